"""Rules about a model's shape and batch: those of megatron-core, checked before it runs.

`toolkit.plan.rules.legality` decides what a pair of engine and model supports; here, whether
this model can be split that way. Every rule names the line of megatron-core 0.16 that would
stop the run or silently compute wrong results, and the nearest legal value.
"""

from collections.abc import Iterator, Mapping
from math import gcd

from toolkit.adapters import lora
from toolkit.backend import BACKENDS
from toolkit.errors import Problem
from toolkit.features.base import hooks
from toolkit.layout import Pair
from toolkit.models import frozen, parameter_groups
from toolkit.models.families import model_spec, settings_of
from toolkit.models.families.common import rope_of, rope_type_of
from toolkit.models.spec import ModelSpec
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import attention, context, kernels, legality
from toolkit.plan.rules.legality import divisors, nearest


def exceeded_positions(config: Mapping[str, object], length: int) -> int | None:
    """The number of positions that this model was made for, if sequences are longer and its
    rotary frequencies are not scaled; otherwise None."""
    spec = model_spec(config)
    if spec.learned_positions or length <= spec.max_positions:
        return None
    unscaled = rope_type_of(rope_of(settings_of(config))) == "default"
    return spec.max_positions if unscaled else None


def position_notes(config: Mapping[str, object], length: int) -> Iterator[str]:
    """What to know of a loaded model whose positions are exceeded."""
    if (most := exceeded_positions(config, length)) is not None:
        yield (
            f"training.sequence_length {length} is above the model's max_position_embeddings "
            f"{most}, which the export keeps (docs/models.md)"
        )


def able_pairs(job: PlanRequest) -> list[Pair]:
    """The pairs that the planner compares for this model and what `job` requests."""
    asked = legality.pairs(job.parallel, job.training.precision)
    able = [pair for pair in asked if not pair_problems(job, pair)]
    return legality.chosen_from(able, job.parallel)


def problems(job: PlanRequest) -> list[Problem]:
    """Why no pair can train this model as asked, each with the nearest legal value.

    The problems are those of the nearest of the legal pairs. Keys are full dotted paths; file
    and line are left to the caller.
    """
    if job.freeze and (wrong := [*frozen.problems(job.freeze, frozen.names_of(job.config))]):
        return wrong
    if job.adapter and (wrong := [*lora.problems(job.adapter, job.config)]):
        return wrong
    most, length = job.spec.max_positions, job.training.sequence_length
    if job.spec.learned_positions and length > most:
        key, allowed = "training.sequence_length", f"at most {most}, the model's positions"
        return [Problem(key, str(length), allowed, f"set {key} to {most}")]
    some, layers = job.parallel.recompute, job.spec.layers
    if isinstance(some, int) and some >= layers:
        allowed, fix = (
            f"less than the model's {layers} layers",
            "set parallel.recompute to full",
        )
        return [Problem("parallel.recompute", str(some), allowed, fix)]
    if wrong := [*attention.problems(job)]:
        return wrong
    if job.optimizer.groups and (
        wrong := [*parameter_groups.problems(job.optimizer.groups, job.trained)]
    ):
        return wrong
    asked = legality.pairs(job.parallel, job.training.precision)
    found = [pair_problems(job, pair) for pair in asked]
    return min(found, key=len, default=[])


def pair_problems(job: PlanRequest, pair: Pair) -> list[Problem]:
    """What keeps `pair` from training this model, one problem per setting."""
    stacked, fused = job.divided
    if offloaded := [*_offloaded_owners(job)]:
        return offloaded
    if wrong := [*_layer_kernels(job, pair)]:
        return wrong
    backend = BACKENDS[pair.engine]
    if job.parallel.stages and legality.table()[pair].largest("pipeline") == 1:
        stated, fix = f"{len(job.parallel.stages)} stages", "set parallel.engine to megatron"
        allowed = f"none with {pair}: it has no pipeline"
        return [Problem("parallel.stages", stated, allowed, fix)]
    if pair.model != "megatron":
        return [*stacked, *_expert(job), *backend.rules(job, pair.model)]
    if reason := job.inexpressible:
        return [_inexpressible(job, pair, reason)]
    some = job.parallel.recompute
    if isinstance(some, int) and not can_recompute_some(job.spec, pair):
        allowed = (
            "none, selective, full: megatron-core gives routers their mask in all or no layers"
        )
        fix = "set parallel.recompute to full (or auto)"
        return [Problem("parallel.recompute", str(some), allowed, fix)]
    if refusal := backend.refusal(job, pair.model):
        return [refusal]
    rules = [_expert, _tensor, _sequence, _pipeline, _stages, _virtual_pipeline]
    found = (problem for rule in rules for problem in rule(job))
    return [*fused, *found, *backend.rules(job, pair.model)]


def can_recompute_some(spec: ModelSpec, pair: Pair) -> bool:
    """Whether some layers can be recomputed and others not. Where megatron-core recomputes only
    some (0.16), it passes the padding mask, without which routers are not balanced, to
    these alone."""
    return pair.model != "megatron" or not spec.moe_layers


def _layer_kernels(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """What compiled layers, fused kernels and features do not support."""
    yield from kernels.problems(job, pair)
    yield from context.problems(job, pair)
    yield from attention.context_problems(job, pair)
    for refuse, _ in hooks("refuse", job.features):
        yield from refuse(job, pair)


def _offloaded_owners(job: PlanRequest) -> Iterator[Problem]:
    """Owners compute on the device, where their buffers and states are."""
    for name in ("offload_optimizer", "offload_parameters"):
        place = getattr(job.parallel.zero, name)
        if job.optimizer.kind.whole is not None and place not in ("none", "auto"):
            yield Problem(
                f"parallel.zero.{name}",
                f"{place} with optimizer.name: {job.optimizer.name}",
                "none: owners update whole tensors on the device, where their states are",
                f"set parallel.zero.{name} to none (or auto), or optimizer.name to adamw",
            )


def _inexpressible(job: PlanRequest, pair: Pair, reason: str) -> Problem:
    family = job.config["model_type"]
    return Problem(
        "model.config",
        f"{family} with {pair}",
        f"what megatron-core computes exactly as transformers does: {reason}",
        "set parallel.model to hf, without pipeline parallel (tensor and expert parallel: "
        "docs/models.md)",
    )


def _expert(job: PlanRequest) -> Iterator[Problem]:
    """moe_layer.py: each rank holds the same number of experts; parallel_state.py: with whole
    experts on each rank, expert · pipeline divides the world."""
    ep, spec = known(job.parallel.expert), job.spec
    if ep is None or ep == 1:
        return
    if not spec.moe_layers:
        yield _refuse("expert", ep, "1 for a model without experts", 1)
        return
    ranks = job.cluster.world_size // (known(job.parallel.pipeline) or 1)
    if spec.experts % ep or ranks % ep:
        allowed = f"a divisor of the {spec.experts} experts and of {ranks} ranks per stage"
        yield _refuse("expert", ep, allowed, nearest(ep, divisors(gcd(spec.experts, ranks))))


def _tensor(job: PlanRequest) -> Iterator[Problem]:
    tp = known(job.parallel.tensor)
    if tp is None or not (objections := _objections(job, tp)):
        return
    others = known(job.parallel.pipeline) or 1
    fit = [d for d in divisors(job.cluster.world_size // others) if not _objections(job, d)]
    yield _refuse("tensor", tp, " and ".join(objections), nearest(tp, fit))


def _objections(job: PlanRequest, tp: int) -> list[str]:
    """Conditions on this model's tensor-parallel degree that `tp` does not satisfy."""
    spec, parallel = job.spec, job.parallel
    found = []
    if spec.heads % tp:  # transformer_config.py
        found.append(f"a divisor of the {spec.heads} attention heads")
    elif spec.kv_heads % tp and tp % spec.kv_heads:  # transformer_config.py
        found.append(f"a multiple or a divisor of the {spec.kv_heads} key/value heads")
    elif (spec.heads + 2 * spec.kv_heads) * spec.head_dim % tp:  # attention.py: linear_qkv
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        found.append(f"a divisor of the {rows} rows of queries, keys and values")
    elif tp > spec.kv_heads and job.adapter and lora.some_of_qkv(job.adapter, job.config):
        found.append(
            f"at most the {spec.kv_heads} key/value heads where only some of query, key and "
            "value have an adapter"
        )
    if spec.moe_layers < spec.layers and spec.intermediate % tp:  # mlp.py: linear_fc1
        found.append(f"a divisor of the MLP's intermediate size {spec.intermediate}")
    if not spec.moe_layers:
        return found
    if parallel.expert == 1 and spec.expert_intermediate % tp:  # the same, expert by expert
        found.append(f"a divisor of the experts' intermediate size {spec.expert_intermediate}")
    shared = job.mapped.transformer.get("moe_shared_expert_intermediate_size", 0)
    if shared % tp:  # shared_experts.py: linear_fc1
        found.append(f"a divisor of the shared experts' intermediate size {shared}")
    length = job.training.sequence_length
    if parallel.sequence == "auto" and length % tp:  # moe_layer.py
        found.append(
            f"a divisor of the sequence length {length}, since experts under tensor parallel "
            "need sequence parallel"
        )
    return found


def _sequence(job: PlanRequest) -> Iterator[Problem]:
    """moe_layer.py refuses experts with tensor parallel without sequence parallel; mappings.py
    splits the sequence into equal parts."""
    tp = known(job.parallel.tensor)
    if tp is None or tp == 1:
        return
    if job.parallel.sequence is False and job.spec.moe_layers:
        yield Problem(
            "parallel.sequence",
            f"false with parallel.tensor: {tp} and experts",
            "true: megatron-core trains experts under tensor parallel only with it",
            "set parallel.sequence to true (or auto)",
        )
    length = job.training.sequence_length
    if job.parallel.sequence is True and length % tp:
        below, above = length // tp * tp, (length // tp + 1) * tp
        lengths = f"{below} or {above}" if below > 1 else str(above)
        otherwise = "" if job.spec.moe_layers else ", or parallel.sequence to false"
        yield Problem(
            "parallel.sequence",
            f"true with parallel.tensor: {tp} and sequences of {length} tokens",
            f"true where tensor divides training.sequence_length: {lengths}",
            f"set training.sequence_length to {lengths.split(' or ')[0]}{otherwise}",
        )


def _pipeline(job: PlanRequest) -> Iterator[Problem]:
    """Every stage has at least one layer."""
    pp, layers = known(job.parallel.pipeline), job.spec.layers
    if pp is None or pp <= layers:
        return
    ranks = job.cluster.world_size // (known(job.parallel.tensor) or 1)
    fit = [d for d in divisors(ranks) if d <= layers]
    yield _refuse("pipeline", pp, f"at most the {layers} layers", nearest(pp, fit))


def _stages(job: PlanRequest) -> Iterator[Problem]:
    """A number for every chunk, which add up to the model."""
    stages, layers = job.parallel.stages, job.spec.layers
    if not stages:
        return
    pp, vpp = known(job.parallel.pipeline), known(job.parallel.virtual_pipeline)
    found = f"[{', '.join(map(str, stages))}]"
    key, chunks = "parallel.stages", None if pp is None or vpp is None else pp * vpp
    if len(stages) != (chunks or len(stages)):
        allowed = f"{chunks} numbers: pipeline {pp} · virtual_pipeline {vpp}"
        yield Problem(key, found, allowed, f"state {chunks} numbers, or none")
    elif chunks is None and len(stages) % ((pp or 1) * (vpp or 1)):
        allowed = f"a multiple of {(pp or 1) * (vpp or 1)} numbers, one for each chunk"
        yield Problem(key, found, allowed, "state as many as stages · chunks, or none")
    if sum(stages) != layers:
        allowed = f"numbers that add up to the model's {layers} layers, not {sum(stages)}"
        last = layers - sum(stages[:-1])
        fix = f"set the last to {last}" if last > 0 else "change them, or remove them"
        yield Problem(key, found, allowed, fix)


def _virtual_pipeline(job: PlanRequest) -> Iterator[Problem]:
    """Every chunk has at least one layer; schedules.py interleaves micro batches in groups
    of one per stage."""
    pp, vpp = known(job.parallel.pipeline), known(job.parallel.virtual_pipeline)
    layers = job.spec.layers
    if pp is None or vpp is None or vpp == 1 or pp > layers:
        return
    if pp * vpp > layers:
        allowed = f"at most {layers // pp}: a layer per chunk, {layers} layers on {pp} stages"
        yield _refuse("virtual_pipeline", vpp, allowed, layers // pp)
        return
    dp = legality.data_parallel(job.parallel, job.cluster)
    micro, batch = known(job.training.micro_batch_size) or 1, job.training.batch_unit
    if dp is None or batch % (dp * micro) or batch // (dp * micro) % pp == 0:
        return  # an uneven batch is reported where batches are
    unit = dp * micro * pp
    batches = " or ".join(str(b) for b in (batch // unit * unit, -(-batch // unit) * unit) if b)
    yield Problem(
        "parallel.virtual_pipeline",
        f"{vpp} with {batch // (dp * micro)} micro batches per step on {pp} stages",
        f"1, or micro batches in a multiple of {pp}: the interleaved schedule's groups",
        f"set parallel.virtual_pipeline to 1, or training.global_batch_size to {batches}",
    )


def _refuse(name: str, found: int, allowed: str, near: int | None) -> Problem:
    fix = f"set parallel.{name} to {near}" if near else f"use fewer ranks for parallel.{name}"
    return Problem(f"parallel.{name}", str(found), allowed, fix)


def known(degree: int | str) -> int | None:
    """A stated number; None for `auto`."""
    return degree if isinstance(degree, int) else None
