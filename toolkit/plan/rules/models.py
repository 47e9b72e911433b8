"""Rules about a model's shape and batch: those of megatron-core, checked before it runs.

`toolkit.plan.rules.legality` decides what a pair of engine and model supports. Here, whether
this model can be split that way. Every rule names the line of megatron-core 0.16 that would
stop the run or silently compute wrong results.
"""

from collections.abc import Iterator, Mapping
from math import gcd

from toolkit.backend import BACKENDS
from toolkit.errors import Problem
from toolkit.layout import Pair
from toolkit.models import frozen, parameter_groups
from toolkit.models.adapters import lora
from toolkit.models.families import model_spec
from toolkit.models.families.arguments import rope_type_of
from toolkit.models.model import read
from toolkit.models.spec import ModelSpec
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import attention, context, kernels, legality
from toolkit.plan.rules.legality import Rule, broken, degree


def exceeded_positions(config: Mapping[str, object], length: int) -> int | None:
    """The number of positions that this model was made for, if sequences are longer and its
    rotary frequencies are not scaled. Otherwise None."""
    spec = model_spec(config)
    if spec.learned_positions or length <= spec.max_positions:
        return None
    unscaled = rope_type_of(read(config).config) == "default"
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
    asked = legality.pairs(job.parallel)
    able = [pair for pair in asked if not pair_problems(job, pair)]
    return legality.chosen_from(able, job.parallel)


def problems(job: PlanRequest) -> list[Problem]:
    """Why no pair can train this model as asked.

    The problems are those of the nearest of the legal pairs. Keys are full dotted paths. File
    and line are left to the caller.
    """
    asked = legality.pairs(job.parallel)
    groups = job.optimizer.groups
    return (
        [*(frozen.problems(job.freeze, frozen.names_of(job.config)) if job.freeze else ())]
        or [*(lora.problems(job.adapter, job.config) if job.adapter else ())]
        or [one for pair in asked[:1] for one in broken(OF_ANY_PAIR, job, pair)]
        or [*attention.problems(job)]
        or [*(parameter_groups.problems(groups, job.trained) if groups else ())]
        or min((pair_problems(job, pair) for pair in asked), key=len, default=[])
    )


def pair_problems(job: PlanRequest, pair: Pair) -> list[Problem]:
    """What keeps `pair` from training this model, one problem per setting."""
    stacked, fused = job.divided
    backend = BACKENDS[pair.engine]
    first = [*broken(OWNERS, job, pair)] or [*_layer_kernels(job, pair)]
    if first or (first := [*broken(NO_STAGES, job, pair)]):
        return first
    if pair.model != "megatron":
        return [*stacked, *broken(EXPERTS, job, pair), *backend.rules(job, pair.model)]
    if unable := next(broken(MEGATRON, job, pair), backend.refusal(job, pair.model)):
        return [unable]
    return [*fused, *broken((*EXPERTS, *SPLITS), job, pair), *backend.rules(job, pair.model)]


def can_recompute_some(spec: ModelSpec, pair: Pair) -> bool:
    """Whether some layers can be recomputed and others not. Where megatron-core recomputes only
    some (0.16), it passes the padding mask, without which routers are not balanced, to
    these alone."""
    return pair.model != "megatron" or not spec.moe_layers


def _layer_kernels(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """What compiled layers and fused kernels do not support."""
    yield from broken(kernels.RULES, job, pair)
    yield from context.problems(job, pair)
    yield from attention.context_problems(job, pair)


def _tensor(job: PlanRequest, _: Pair) -> str:
    """The first condition on this model's tensor-parallel degree that it does not satisfy."""
    tp, spec, parallel = degree(job.parallel.tensor), job.spec, job.parallel
    rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    length, dense = job.training.sequence_length, spec.moe_layers < spec.layers
    if tp == 1:
        return ""
    if spec.heads % tp:  # transformer_config.py
        return f"a divisor of the {spec.heads} attention heads"
    if spec.kv_heads % tp and tp % spec.kv_heads:  # transformer_config.py
        return f"a multiple or a divisor of the {spec.kv_heads} key/value heads"
    if rows % tp:  # attention.py: linear_qkv
        return f"a divisor of the {rows} rows of queries, keys and values"
    if tp > spec.kv_heads and job.adapter and lora.some_of_qkv(job.adapter, job.config):
        why = "where only some of query, key and value have an adapter"
        return f"at most the {spec.kv_heads} key/value heads {why}"
    if dense and spec.intermediate % tp:  # mlp.py: linear_fc1
        return f"a divisor of the MLP's intermediate size {spec.intermediate}"
    if not spec.moe_layers:
        return ""
    if parallel.expert == 1 and spec.expert_intermediate % tp:  # the same, expert by expert
        return f"a divisor of the experts' intermediate size {spec.expert_intermediate}"
    shared = job.mapped.transformer.get("moe_shared_expert_intermediate_size", 0)
    if shared % tp:  # shared_experts.py: linear_fc1
        return f"a divisor of the shared experts' intermediate size {shared}"
    if parallel.sequence == "auto" and length % tp:  # moe_layer.py
        why = "as experts under tensor parallel need sequence parallel"
        return f"a divisor of the sequence length {length}, {why}"
    return ""


def _stages(job: PlanRequest, _: Pair) -> str:
    """A number for every chunk, which add up to the model."""
    stages, parallel = job.parallel.stages, job.parallel
    chunks = degree(parallel.pipeline) * degree(parallel.virtual_pipeline)
    settled = "auto" not in (parallel.pipeline, parallel.virtual_pipeline)
    if not stages:
        return ""
    if len(stages) != chunks if settled else len(stages) % chunks:
        return f"{chunks} numbers{'' if settled else ' or a multiple'}, one for each chunk"
    total, layers = sum(stages), job.spec.layers
    return "" if total == layers else f"numbers that add up to {layers} layers, not {total}"


def _on_device(states: str) -> Rule:
    return Rule(
        f"parallel.zero.{states}",
        lambda j, _: (
            j.optimizer.kind.whole is not None
            and getattr(j.parallel.zero, states) not in ("none", "auto")
        ),
        "none with {j.optimizer.name}, whose owners update whole tensors on the device",
    )


def _ranks(job: PlanRequest) -> int:
    """Ranks of a pipeline stage."""
    return job.cluster.world_size // degree(job.parallel.pipeline)


OF_ANY_PAIR = (
    Rule(
        "training.sequence_length",
        lambda j, _: (
            j.spec.learned_positions and j.training.sequence_length > j.spec.max_positions
        ),
        "at most {j.spec.max_positions}, the model's positions",
        "set {key} to {j.spec.max_positions}",
    ),
    Rule(
        "parallel.recompute",
        lambda j, _: degree(j.parallel.recompute) >= max(2, j.spec.layers),
        "less than the model's {j.spec.layers} layers",
    ),
)
"""What no pair can do."""
OWNERS = (_on_device("offload_optimizer"), _on_device("offload_parameters"))
NO_STAGES = (
    Rule(
        "parallel.stages",
        lambda j, p: j.parallel.stages and legality.table()[p].largest("pipeline") == 1,
        "none with {p}: it has no pipeline",
        "set parallel.engine to megatron",
    ),
)
MEGATRON = (
    Rule(
        "model.config",
        lambda j, _: j.inexpressible,
        "what megatron-core computes exactly as transformers does: {why}",
        "set parallel.model to hf, without pipeline parallel (tensor and expert parallel: "
        "docs/models.md)",
        "{j.config[model_type]} with {p}",
    ),
    Rule(
        "parallel.recompute",
        lambda j, p: (
            isinstance(j.parallel.recompute, int) and not can_recompute_some(j.spec, p)
        ),
        "none, selective, full: megatron-core gives routers their mask in all or no layers",
    ),
)
"""What megatron-core's model cannot do at all."""
EXPERTS = (
    Rule(
        "parallel.expert",
        lambda j, _: not j.spec.moe_layers and degree(j.parallel.expert) > 1,
        "1 for a model without experts",
    ),
    Rule(  # moe_layer.py; parallel_state.py
        "parallel.expert",
        lambda j, _: gcd(j.spec.experts, _ranks(j)) % degree(j.parallel.expert),
        "a divisor of the {j.spec.experts} experts and of a pipeline stage's ranks",
    ),
)
SPLITS = (
    Rule("parallel.tensor", _tensor),
    Rule(
        "parallel.sequence",
        lambda j, _: (
            degree(j.parallel.tensor) > 1 and j.parallel.sequence is False and j.spec.moe_layers
        ),
        "true: megatron-core trains experts under tensor parallel only with it",  # moe_layer.py
    ),
    Rule(
        "parallel.sequence",
        lambda j, _: (
            j.parallel.sequence is True
            and j.training.sequence_length % degree(j.parallel.tensor)
        ),
        "true where tensor divides the {j.training.sequence_length} tokens",  # mappings.py
        found="true with parallel.tensor: {j.parallel.tensor}",
    ),
    Rule(
        "parallel.pipeline",
        lambda j, _: degree(j.parallel.pipeline) > j.spec.layers,
        "at most the {j.spec.layers} layers",
    ),
    Rule("parallel.stages", _stages, fix="state that many, or none"),
    Rule(
        "parallel.virtual_pipeline",
        lambda j, _: (
            degree(j.parallel.pipeline)
            <= j.spec.layers
            < degree(j.parallel.pipeline) * degree(j.parallel.virtual_pipeline)
        ),
        "at most a chunk for each of {j.spec.layers} layers on {j.parallel.pipeline} stages",
    ),
)
"""How megatron-core splits this model."""
