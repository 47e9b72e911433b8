"""Enumerates every possible layout of a recipe, from which the planner chooses. Settings of the
recipe are kept. `auto` takes every value that `legality` and `model_rules` allow.

A `PartialLayout` is a layout without batch split and recompute, which the search chooses by
what fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, isqrt
from typing import NamedTuple

from toolkit.errors import PlanError
from toolkit.layout import Layout, LossKernel, Pair, Placement, Recompute
from toolkit.plan.cost.workload import Workload, workload_of
from toolkit.plan.dimensions import DIMENSIONS
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import context, kernels, legality
from toolkit.plan.rules.legality import divisors, table
from toolkit.plan.rules.models import able_pairs, pair_problems
from toolkit.recipe.schema import ParallelSection, Recipe

Offload = tuple[Placement, Placement]
"""Where optimizer states and parameters are kept."""
_IN_PARALLEL = [
    one for one in DIMENSIONS if one.key.startswith("parallel.") and one.field != "recompute"
]
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class PartialLayout:
    """A layout without batch split and recompute."""

    pair: Pair
    workload: Workload
    layout: Layout
    """The layout, with a micro batch of 1 and the accumulation that follows."""
    micro_batches: tuple[int, ...]
    """Sequences per forward pass that spread the batch evenly, ascending. May be empty."""
    recomputes: tuple[tuple[Recompute, LossKernel], ...]
    """Possible recompute of layers and logits, least first."""

    def split(self, micro_batch: int, recompute: Recompute, loss: LossKernel) -> Layout:
        """The whole layout."""
        share = self.layout.gradient_accumulation
        # Faster than dataclasses.replace, which a search would call a hundred thousand times.
        fields = self.layout.__dict__ | {
            "recompute": recompute,
            "loss": loss,
            "micro_batch": micro_batch,
            "gradient_accumulation": share // micro_batch,
        }
        return Layout(**fields)


class SearchBounds(NamedTuple):
    """How far the search goes with what is open."""

    offloads: tuple[Offload, ...]
    largest_tensor: int
    context: bool
    """Whether context parallel is tried."""


def bounds(job: PlanRequest, island: int) -> list[SearchBounds]:
    """Ever wider bounds, until something fits with a margin of memory.

    States are offloaded step by step. Tensor groups leave the `island` of accelerators
    connected by the fast link only then: layers wait for their collectives, and no source has
    measured them through a network. Short rows are spread over context groups last.
    """
    placements, widest = _placements(job.parallel), job.spec.heads
    long = job.parallel.context != "auto" or job.training.sequence_length >= context.LONG
    steps = range(1, len(placements) + 1)
    found = [
        SearchBounds(tuple(placements[:most]), min(island, widest), long) for most in steps
    ]
    found.append(found[-1]._replace(largest_tensor=widest))
    return found if long else [*found, found[-1]._replace(context=True)]


def _placements(parallel: ParallelSection) -> list[Offload]:
    """Possible offload, least first. NVMe only if the recipe names a folder."""
    zero = parallel.zero
    steps: list[Offload] = [("none", "none"), ("cpu", "none"), ("cpu", "cpu")]
    if zero.nvme_path is not None:
        steps += [("nvme", "cpu"), ("nvme", "nvme")]
    asked = (zero.offload_optimizer, zero.offload_parameters)
    if zero.config is not None:  # the user's own file decides offload
        steps = steps[:1]
    found = [
        (asked[0] if asked[0] != "auto" else one[0], asked[1] if asked[1] != "auto" else one[1])
        for one in steps
    ]
    return list(dict.fromkeys(found))


def partial_layouts(job: PlanRequest, within: SearchBounds) -> Iterator[PartialLayout]:
    """Every partial layout within these bounds, in a fixed order."""
    batch = job.training.global_batch_size
    for pair in able_pairs(job):
        workload, recomputes = workload_of(job, pair), _recomputes(job, pair)
        for parallel in _settled(job, pair, within):
            layout = _layout(job, pair, parallel)
            sizes = tuple(_micro_batches(job, layout))
            share = max(1, batch // layout.dp)
            for exchange in context.exchanges(job, parallel):
                whole = replace(layout, exchange=exchange, gradient_accumulation=share)
                yield PartialLayout(pair, workload, whole, sizes, recomputes)


def _settled(job: PlanRequest, pair: Pair, within: SearchBounds) -> Iterator[ParallelSection]:
    """The recipe's intent with every possible choice of its open settings, less communication
    first. Sequence parallel needs less memory than tensor parallel alone, so `auto` has it
    where it is possible."""
    asked, support, layers = job.parallel, table()[pair], job.spec.layers
    ranks, every = job.cluster.world_size, divisors(job.cluster.world_size)
    widest = min(support.largest("tensor"), within.largest_tensor)
    deepest = min(support.largest("pipeline"), layers)
    for offload, pipeline, tensor in product(
        within.offloads,
        _open(asked.pipeline, every, deepest),
        _open(asked.tensor, every, widest),
    ):
        places = zip(("offload_optimizer", "offload_parameters"), offload, strict=True)
        zero = asked.zero.model_copy(update=dict(places))
        stages = legality.zero_stages(asked.model_copy(update={"zero": zero}), pair)
        copies, rest = divmod(ranks, tensor * pipeline)
        if rest:
            continue
        # Stage 0 sends as much as stage 1, which shards the optimizer.
        useful = [one for one in stages if one or copies == 1 or 1 not in stages]
        for virtual, cp, expert, stage, replicate in product(
            _chunks(asked, layers, pipeline, support.largest("virtual_pipeline")),
            _contexts(job, pair, within, copies),
            _experts(job, pair, ranks // pipeline),
            useful,
            _replicas(job, pair, offload, copies),
        ):
            update = {
                "engine": pair.engine,
                "model": pair.model,
                "tensor": tensor,
                "pipeline": pipeline,
                "virtual_pipeline": virtual,
                "context": cp,
                "expert": expert,
                "replicate": replicate,
                "zero": zero.model_copy(update={"stage": stage}),
            }
            sequences = (True, False) if tensor > 1 else (False,)
            for sequence in sequences if asked.sequence == "auto" else (asked.sequence,):
                settled = asked.model_copy(update=update | {"sequence": sequence})
                if _is_legal(job, pair, settled):
                    yield settled
                    break


def _is_legal(job: PlanRequest, pair: Pair, settled: ParallelSection) -> bool:
    if legality.problems(settled, job.cluster):
        return False
    return not pair_problems(job.asking(parallel=settled), pair)


def _chunks(asked: ParallelSection, layers: int, pipeline: int, most: int) -> list[int]:
    """Chunks of a stage. The first and the last chunk may be shorter or longer. If others
    differ, ranks wait for each other in ways that no closed form describes, so only a recipe
    that states such a degree gets it. `stage_layers` lengthens the chunks between the two
    first."""
    most = min(most, layers // pipeline if pipeline > 1 else 1)
    found = _open(asked.virtual_pipeline, range(1, most + 1), most)
    if asked.stages:
        return [one for one in found if len(asked.stages) == pipeline * one]

    def even(virtual: int) -> bool:
        between = pipeline * virtual - 2
        return virtual == 1 or layers % (between + 2) in (0, between, between + 1)

    return found if asked.virtual_pipeline != "auto" else [*filter(even, found)]


def _contexts(job: PlanRequest, pair: Pair, within: SearchBounds, ranks: int) -> list[int]:
    """Context-parallel degrees that divide so many ranks."""
    most = table()[pair].largest("context") if within.context else 1
    asked = job.parallel.context
    found = _open(asked, divisors(ranks), most)
    if asked == "auto" and context.is_used(job.kernels.context):
        found = [one for one in found if one > 1]
    return [one for one in found if ranks % one == 0]


def _open(asked: int | str, all_of: Sequence[int], most: int) -> list[int]:
    """The requested value. For `auto`, all that are small enough."""
    if isinstance(asked, int):
        return [asked]
    return [degree for degree in all_of if degree <= most]


def _experts(job: PlanRequest, pair: Pair, ranks: int) -> list[int]:
    """Expert-parallel degrees: parts of the experts and of a pipeline stage's ranks."""
    every = divisors(gcd(job.spec.experts, ranks)) if job.spec.moe_layers else [1]
    return _open(job.parallel.expert, every, table()[pair].largest("expert"))


def _replicas(job: PlanRequest, pair: Pair, offload: Offload, ranks: int) -> list[int]:
    """Possible numbers of replicas of the shards. A model that fits only with offload has no
    room for replicas."""
    asked = job.parallel.replicate
    if isinstance(asked, int):
        return [asked]
    if table()[pair].largest("replicate") == 1 or offload != ("none", "none"):
        return [1]
    return legality.copies_of(ranks)


def _recomputes(job: PlanRequest, pair: Pair) -> tuple[tuple[Recompute, LossKernel], ...]:
    layers, loss = job.parallel.recompute, job.kernels.loss
    able = [one for one in _RECOMPUTE if one in table()[pair].recompute]
    return tuple(
        product(
            able if layers == "auto" else [layers],
            ("whole", "chunked") if loss == "auto" else [loss],
        )
    )


def _layout(job: PlanRequest, pair: Pair, parallel: ParallelSection) -> Layout:
    """The layout of a complete intent."""
    complete = job.asking(parallel=parallel)  # derives nothing from the model again
    stated = {one.field: one.of(complete) for one in _IN_PARALLEL}
    settled = {field: value for field, value in stated.items() if value is not None}
    return Layout(
        dp=job.cluster.world_size // (settled["tp"] * settled["pp"] * settled["cp"]),
        **settled,
        compile=kernels.compiled(complete, pair, settled["zero_stage"]),
        fused=kernels.fused(job, pair),
        experts=kernels.expert_products(job, pair, parallel),
    )


def _micro_batches(job: PlanRequest, layout: Layout) -> list[int]:
    """Sizes that spread the batch. The interleaved schedule takes one per stage at a time."""
    group = layout.pp if layout.vpp > 1 else 1
    share, rest = divmod(job.training.batch_unit, layout.dp)
    if rest or not share:
        return []
    wanted = job.training.micro_batch_size
    sizes = _all_divisors(share) if wanted == "auto" else [wanted]
    return [size for size in sizes if share % (size * group) == 0]


def _all_divisors(number: int) -> list[int]:
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return small + [number // one for one in reversed(small) if one * one != number]


def no_layout(job: PlanRequest, within: SearchBounds) -> PlanError:
    """Why there is no layout: the model's shape, or the batch."""
    layouts = [one.layout for one in partial_layouts(job, within)]
    if layouts:
        layout = min(layouts, key=lambda one: (one.dp, one.vpp))
        return uneven_batch(job, layout.dp, layout.pp if layout.vpp > 1 else 1)
    names = ("sequence", "virtual_pipeline", "pipeline", "tensor")
    stated = [f"parallel.{one}" for one in names if getattr(job.parallel, one) != "auto"]
    return PlanError(
        f"parallel.tensor: no tensor, pipeline and context degrees that suit this model divide "
        f"{job.cluster.world_size} ranks as the recipe asks",
        fix=f"set {' and '.join(stated)} to auto" if stated else "use another number of ranks",
    )


def uneven_batch(job: PlanRequest | Recipe, dp: int, group: int = 1) -> PlanError:
    """The error if the batch cannot be spread, with the nearest batches that can. Ranks take
    `group` micro batches at a time."""
    training = job.training
    wanted, batch = training.micro_batch_size, training.batch_unit
    unit = dp * group * (1 if wanted == "auto" else wanted)
    groups = f", {group} micro batches at a time" if group > 1 else ""
    below, above = batch // unit * unit, (batch // unit + 1) * unit
    micro = "" if wanted == "auto" else f" in micro batches of {wanted}"
    key, sizes = "training.global_batch_size", f"{batch} samples"
    fix = f"set {key} to " + (f"{below} or {above}" if below else f"{above}")
    if training.batch_ramp is not None:
        key, sizes = "training.batch_ramp", f"multiples of {batch} samples"
        fix = f"set start, increment and training.global_batch_size to multiples of {unit}"
    elif not below and training.sequence_length >= context.LONG and job.parallel.context == 1:
        fix += ", or spread long rows: set parallel.context or parallel.tensor to 2 or more"
    return PlanError(
        f"{key}: {sizes} cannot be spread evenly over {dp} ranks{micro}{groups}",
        fix=fix,
    )
