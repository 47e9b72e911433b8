"""Degrees of parallelism that a recipe leaves open, decided by simple rules.

Least communication first: no model parallelism where the model states fit without; else
tensor parallel within a node; else pipeline stages across nodes.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import inf

from toolkit.errors import PlanError
from toolkit.plan import legality
from toolkit.plan.layout import Layout, stage_layers
from toolkit.plan.legality import ANY, TABLE, Pair
from toolkit.plan.memory import building_gib, states_peak_gib
from toolkit.plan.model_rules import Job, pair_problems
from toolkit.plan.workload import Workload
from toolkit.recipe.schema import ParallelSection


def choose_degrees(
    job: Job, pair: Pair, workload: Workload, room_gib: float
) -> tuple[Layout, list[str]]:
    """The layout but for ZeRO stage, batch split and recompute, and a reason per decision.

    The first of the candidates whose model states never take more than `room_gib` of a
    device, else the one that splits the model most. Raises PlanError when no degrees suit
    the model.
    """
    if pair.model == "hf":
        return _layout(job, job.parallel), []
    legal = list(_candidates(job, pair))
    if not legal:
        raise PlanError(
            f"parallel.tensor: no tensor and pipeline degrees that suit this model divide "
            f"{job.cluster.world_size} ranks as the recipe asks",
            fix=_loosened(job, pair) or "use another number of ranks",
        )
    # Where no candidate can spread the batch, the micro batch rule says so.
    candidates = [one for one in legal if _spreads(job, _layout(job, one))] or legal[:1]
    stages = legality.zero_stages(job.parallel, pair)

    def least_gib(layout: Layout) -> float:
        return min(
            states_peak_gib(workload, replace(layout, zero_stage=stage)) for stage in stages
        )

    layouts = [_layout(job, one) for one in candidates]
    within = (layout for layout in layouts if least_gib(layout) <= room_gib)
    layout = next(within, None) or max(layouts, key=lambda one: (one.tp * one.pp, one.tp))
    split = "the most"
    if least_gib(layout) <= room_gib:
        split = "the least that model states fit with"
        if least_gib(layout) == building_gib(workload, layout):
            split = "the least that the weights fit with before ZeRO shards them"
    return layout, list(_reasons(job, pair, layout, split, limited=room_gib != inf))


def _candidates(job: Job, pair: Pair) -> Iterator[ParallelSection]:
    """The recipe's intent with every legal choice of open degrees, smaller ones first."""
    parallel, support = job.parallel, TABLE[pair]
    tensors = _degrees(parallel.tensor, min(support.tensor, job.cluster.gpus_per_node))
    stages = _degrees(parallel.pipeline, min(support.pipeline, job.spec.layers))
    virtual = 1 if parallel.virtual_pipeline == "auto" else parallel.virtual_pipeline
    for pipeline in stages:
        for tensor in tensors:
            update = {
                "engine": pair.engine,
                "model": pair.model,
                "tensor": tensor,
                "pipeline": pipeline,
                "virtual_pipeline": virtual,
            }
            settled = parallel.model_copy(update=update)
            one = replace(job, parallel=settled)
            if not legality.problems(settled, job.cluster) and not pair_problems(one, pair):
                yield settled


def _loosened(job: Job, pair: Pair) -> str:
    """The fewest stated settings to leave open so that degrees suit; empty where none do."""
    names = ("sequence", "virtual_pipeline", "pipeline", "tensor")
    stated = [name for name in names if getattr(job.parallel, name) != "auto"]
    for count in range(1, len(stated) + 1):
        for opened in combinations(stated, count):
            parallel = job.parallel.model_copy(update=dict.fromkeys(opened, "auto"))
            if any(_candidates(replace(job, parallel=parallel), pair)):
                return f"set {' and '.join(f'parallel.{name} to auto' for name in opened)}"
    return ""


def _degrees(asked: int | str, most: int) -> list[int]:
    """The degree asked for; for `auto`, the powers of two up to `most`."""
    if isinstance(asked, int):
        return [asked]
    return [2**power for power in range(ANY.bit_length()) if 2**power <= most]


def _layout(job: Job, parallel: ParallelSection) -> Layout:
    """The layout of settled degrees (what is still `auto` counts as 1)."""
    tp, pp, vpp = (
        degree if isinstance(degree, int) else 1
        for degree in (parallel.tensor, parallel.pipeline, parallel.virtual_pipeline)
    )
    sequence = parallel.sequence
    if sequence == "auto":
        sequence = tp > 1 and job.training.sequence_length % tp == 0
    return Layout(
        dp=job.cluster.world_size // (tp * pp * parallel.context),
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=parallel.context,
        ep=parallel.expert,
        sequence_parallel=sequence,
        offload_optimizer=parallel.zero.offload_optimizer,
        offload_parameters=parallel.zero.offload_parameters,
    )


def _spreads(job: Job, layout: Layout) -> bool:
    micro = job.training.micro_batch_size
    unit = layout.dp * (micro if isinstance(micro, int) else 1)
    return job.training.global_batch_size % unit == 0


def _reasons(
    job: Job, pair: Pair, layout: Layout, split: str, *, limited: bool
) -> Iterator[str]:
    """One line per degree that this pair can set; `split` is why one is above 1."""

    def why(asked: int | str, degree: int) -> str:
        if asked != "auto":
            return "asked for"
        if not limited:
            return "auto on CPU, where memory is not the limit"
        return f"auto; {'more would not be better' if degree == 1 else split}"

    parallel, tp, pp = job.parallel, layout.tp, layout.pp
    spans = job.cluster.gpus_per_node % tp != 0
    yield f"tensor {tp}: {why(parallel.tensor, tp)}" + (
        "; WARNING: its groups reach across nodes, where every layer waits for the network"
        if spans
        else ""
    )
    if tp > 1:
        yield _sequence_reason(job, layout)
    if TABLE[pair].pipeline > 1:
        chunks = stage_layers(job.spec.layers, pp, layout.vpp)
        layers = f"; {_counted(chunks)} layers" if pp > 1 else ""
        yield f"pipeline {pp}: {why(parallel.pipeline, pp)}{layers}"
    if pp > 1:
        asked = "auto" if parallel.virtual_pipeline == "auto" else "asked for"
        yield f"virtual pipeline {layout.vpp}: {asked}"
    if layout.ep > 1:
        yield f"expert {layout.ep}: asked for; {job.spec.experts // layout.ep} experts per rank"


def _sequence_reason(job: Job, layout: Layout) -> str:
    on, length = layout.sequence_parallel, job.training.sequence_length
    if job.parallel.sequence != "auto":
        return f"sequence parallel {str(on).lower()}: asked for"
    divides = f"tensor {layout.tp} {'divides' if on else 'does not divide'} {length:,} tokens"
    return f"sequence parallel {str(on).lower()}: auto; {divides}"


def _counted(chunks: tuple[int, ...]) -> str:
    """(7, 8, 8, 7) → `7 + 2 × 8 + 7`."""
    runs: list[list[int]] = []
    for size in chunks:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return " + ".join(f"{count} × {size}" if count > 1 else str(size) for count, size in runs)
