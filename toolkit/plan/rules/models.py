"""Rules about a model's shape and batch: those of megatron-core, checked before it runs.

`toolkit.plan.rules.legality` decides what a pair of engine and model supports; here, whether
this model can be split that way. Every rule names the line of megatron-core 0.16 that would
stop the run or silently compute wrong results, and the nearest legal value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd

from toolkit.adapters import lora
from toolkit.backend import BACKENDS
from toolkit.errors import Problem
from toolkit.features.base import Settings, changed, hooks
from toolkit.layout import AttentionKernel, Pair
from toolkit.models import frozen, parameter_groups
from toolkit.models.families import MegatronModel, mapped, unsupported
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.owners import OwnerUpdates, owner_updates
from toolkit.plan.cost.workload import Workload, planned_workload
from toolkit.plan.rules import attention, compiling, experts, fusing, legality
from toolkit.plan.rules.legality import divisors, nearest
from toolkit.recipe.schema import (
    AdapterSection,
    ClusterSection,
    KernelsSection,
    OptimizerSection,
    ParallelSection,
    Recipe,
    TrainingSection,
)


@dataclass(frozen=True)
class PlanRequest:
    """The rules' inputs from a recipe; `config` is valid."""

    parallel: ParallelSection
    cluster: ClusterSection
    training: TrainingSection
    config: Mapping[str, object]
    freeze: tuple[str, ...] = ()
    """The recipe's `model.freeze`."""
    isolates: bool = False
    """The documents of a sequence are isolated."""
    adapter: AdapterSection | None = None
    """The recipe's `adapter`."""
    optimizer: OptimizerSection = field(
        default_factory=lambda: OptimizerSection(learning_rate=1.0)
    )
    kernels: KernelsSection = field(default_factory=KernelsSection)
    features: Settings = field(default_factory=dict)
    """The settings of the features that are on."""
    lengths: tuple[int, ...] = ()
    """Of sequences, where `data.stages` changes it; `training` has the longest."""
    has_weights: bool = False
    """Training begins with weights that exist."""

    @classmethod
    def of(
        cls, recipe: Recipe, cluster: ClusterSection, config: Mapping[str, object]
    ) -> "PlanRequest":
        """What the rules read of `recipe` on this cluster, for the model of this `config`."""
        lengths = recipe.trained_lengths
        return cls(
            recipe.parallel,
            cluster,
            recipe.training.model_copy(update={"sequence_length": lengths[-1]}),
            config,
            recipe.model.freeze,
            recipe.data.isolates,
            recipe.adapter,
            recipe.optimizer,
            recipe.kernels,
            recipe.features,
            lengths if len(lengths) > 1 else (),
            recipe.model.init != "random",
        )

    def uneven(self, tensor: int) -> int | None:
        """A sequence length that a tensor-parallel degree does not divide."""
        lengths = self.lengths or (self.training.sequence_length,)
        return next((length for length in lengths if length % tensor), None)

    def workload(self, pair: Pair) -> Workload:
        """What is trained, on an engine and a model implementation.

        On CPUs, whose cores also communicate, the gain of less overlapping communication was
        not measured.
        """
        on_cpus, auto = self.cluster.gpu == "cpu", self.parallel.overlap == "auto"
        pays = not on_cpus or not legality.table()[pair].without_overlap
        plain = planned_workload(
            self.spec,
            self.training,
            pair,
            isolates=self.isolates,
            updates=self.updates,
            overlap=auto and pays,
            keeps_sent=auto and on_cpus,
            attention="eager" if attention.whole_scores(self) else "fused",
            cudnn=self.attention_kernel == "cudnn",
            reduce_bytes=BACKENDS[pair.engine].reduce_bytes(self.parallel.zero),
            zero=self.parallel.zero,
        )
        workload: Workload = changed("cost", plain, self.features)
        return workload

    @cached_property
    def attention_kernel(self) -> AttentionKernel:
        """Which of torch's attention kernels is tried first."""
        return attention.kernel(self)

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's shape, with its frozen tensors and adapters."""
        return lora.spec_of(self.config, self.freeze, self.adapter)

    @cached_property
    def updates(self) -> OwnerUpdates | None:
        """What an optimizer other than AdamW updates as wholes."""
        return owner_updates(self.config, self.freeze, self.optimizer)

    @cached_property
    def mapped(self) -> MegatronModel:
        """The model in megatron-core's terms; its map exists even if it is not expressible."""
        return mapped(self.config)

    @cached_property
    def inexpressible(self) -> str | None:
        """Why megatron-core cannot compute this model exactly; None if it can."""
        return unsupported(self.config)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The checkpoint tensors that train."""
        return lora.trained_tensors(self.config, self.freeze, self.adapter)

    @cached_property
    def divided(self) -> tuple[list[Problem], list[Problem]]:
        """Why transformers, and why megatron-core, cannot freeze a part of a parameter or use
        another learning rate for it."""
        if not self.freeze and not self.optimizer.groups:
            return [], []
        names = frozen.matching(self.freeze, frozen.names_of(self.config))
        adapters = lora.lora_of(self.adapter, self.config)
        model = adapters.adapted(self.mapped) if adapters else self.mapped
        stacked, fused = (
            [
                *frozen.part_problems(names, parameters),
                *parameter_groups.part_problems(
                    self.optimizer.groups, ({*one} & self.trained for one in parameters)
                ),
            ]
            for parameters in (frozen.stacked(self.config), frozen.fused(model))
        )
        return stacked, fused

    def asking(self, parallel: ParallelSection) -> "PlanRequest":
        """The same job with another intent; values derived from the config are kept."""
        other = replace(self, parallel=parallel)
        for name in ("spec", "updates", "attention_kernel", "inexpressible", "divided"):
            other.__dict__[name] = getattr(self, name)
        return other


def able_pairs(job: PlanRequest) -> list[Pair]:
    """The pairs that can train this model as `job` requests, preferred first."""
    asked = legality.pairs(job.parallel, job.training.precision)
    return [pair for pair in asked if not pair_problems(job, pair)]


def problems(job: PlanRequest) -> list[Problem]:
    """Why no pair can train this model as asked, each with the nearest legal value.

    The problems are those of the nearest of the legal pairs. Keys are full dotted paths; file
    and line are left to the caller.
    """
    if job.freeze and (wrong := [*frozen.problems(job.freeze, frozen.names_of(job.config))]):
        return wrong
    if job.adapter and (wrong := [*lora.problems(job.adapter, job.config)]):
        return wrong
    some, layers = job.parallel.recompute, job.spec.layers
    if isinstance(some, int) and some >= layers:
        allowed, fix = (
            f"less than the model's {layers} layers",
            "set parallel.recompute to full",
        )
        return [Problem("parallel.recompute", str(some), allowed, fix)]
    if wrong := [*attention.problems(job)]:
        return wrong
    if job.optimizer.layer_decay and (wrong := [*parameter_groups.decay_problems(job.trained)]):
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
    if pair.model != "megatron":
        return [*stacked, *backend.rules(job, pair.model)]
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
    rules = [_expert, _tensor, _sequence, _pipeline, _virtual_pipeline]
    found = (problem for rule in rules for problem in rule(job))
    return [*fused, *found, *backend.rules(job, pair.model)]


def can_recompute_some(spec: ModelSpec, pair: Pair) -> bool:
    """Whether some layers can be recomputed and others not. Where megatron-core recomputes only
    some (0.16), it passes the padding mask, without which routers are not balanced, to
    these alone."""
    return pair.model != "megatron" or not spec.moe_layers


def _layer_kernels(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """What compiled layers, fused kernels and features do not support."""
    if job.kernels.compile == "layers":
        yield from compiling.problems(job, pair)
    yield from fusing.problems(job, pair)
    yield from experts.problems(job, pair)
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
        "set parallel.model to hf, without tensor, pipeline or expert parallel",
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
    if parallel.sequence == "auto" and (length := job.uneven(tp)):  # moe_layer.py
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
    if job.parallel.sequence is True and (length := job.uneven(tp)):
        below, above = length // tp * tp, (length // tp + 1) * tp
        lengths = f"{below} or {above}" if below > 1 else str(above)
        otherwise = "" if job.spec.moe_layers else ", or parallel.sequence to false"
        what, fix = "every sequence_length", f"choose lengths that {tp} divides"
        if not job.lengths:
            what = "training.sequence_length"
            fix = f"set {what} to {lengths.split(' or ')[0]}"
        yield Problem(
            "parallel.sequence",
            f"true with parallel.tensor: {tp} and sequences of {length} tokens",
            f"true where tensor divides {what}: {lengths}",
            f"{fix}{otherwise}",
        )


def _pipeline(job: PlanRequest) -> Iterator[Problem]:
    """Every stage has at least one layer."""
    pp, layers = known(job.parallel.pipeline), job.spec.layers
    if pp is None or pp <= layers:
        return
    ranks = job.cluster.world_size // (known(job.parallel.tensor) or 1)
    fit = [d for d in divisors(ranks) if d <= layers]
    yield _refuse("pipeline", pp, f"at most the {layers} layers", nearest(pp, fit))


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
    micro, batch = known(job.training.micro_batch_size) or 1, job.training.global_batch_size
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
