"""Why a plan is as it is: a line for each decision, and what to know before the run."""

from collections.abc import Iterator

from toolkit.layout import Pair, stage_layers
from toolkit.plan.alternatives import over
from toolkit.plan.dimensions import (
    DIMENSIONS,
    Dimension,
    division_text,
    layout_text,
    recompute_text,
)
from toolkit.plan.estimate import MARGIN, Estimate
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import attention, kernels
from toolkit.plan.rules import models as model_rules
from toolkit.plan.search import WORTH, Search
from toolkit.text.units import byte_size

_ALWAYS = ("zero_stage", "micro_batch", "recompute")
LEAST_GAIN = 0.001
"""A smaller difference of predicted times is none."""
_UNMEASURED = {
    ("loss", "liger"): "planned as long as chunks; not measured with a loss per token",
    ("fused", "liger"): "planned as one kernel each; not measured on a GPU",
}


def reasons(found: Search, built_gib: float) -> Iterator[str]:
    """Every line. `built_gib`: memory while the model is built."""
    job, best = found.job, found.best
    yield why(found)
    yield _pair(job, best.pair)
    values = vars(best.layout) | {"recompute": recompute_text(best.layout)}
    for one in DIMENSIONS:
        note = _note(job, best, one)
        if one.used(best.layout) or one.field in _ALWAYS or note:
            told = "auto" if one.of(job) == "auto" else "asked for"
            value = str(values[one.field]).lower()
            yield f"{one.name} {value}: {told}{f'; {note}' if note else ''}"
    kernel, because = attention.choice(with_context(job, best))
    rest = "; torch's other kernels where it cannot" if kernel in ("cudnn", "flash") else ""
    yield f"attention {kernel}: {because}{rest}"
    if job.optimizer.kind.whole is not None:
        yield f"optimizer {job.optimizer.name}: its step is timed as AdamW's"
    if found.cluster.gpu.memory_gib is None and found.cluster.gpu.measured is None:
        yield "speed: nominal; `dmt doctor --calibrate` measures that of a CPU"
    if job.training.deterministic:
        yield "deterministic: asked for; slower kernels on GPUs, by how much is not predicted"
    if job.spec.generic:
        family = job.spec.family
        yield f"model {family}: generic, counted on transformers' own; docs/models.md"
    if job.spec.assumed:
        yield "FLOPs: assumed, 2 per weight and full attention in every layer; MFU is as rough"
    if found.fits and built_gib >= best.memory_gib:
        built = f"{built_gib:.1f} GiB while the model is built, before ZeRO shards it"
        yield f"memory: fullest at {built}"
    yield from _warnings(found)


def with_context(job: PlanRequest, best: Estimate) -> PlanRequest:
    """The job with the context-parallel degree that was found."""
    degree = {"context": best.layout.cp}
    return job.asking(parallel=job.parallel.model_copy(update=degree))


def compared_engines(found: Search) -> list[str]:
    """The engines whose layouts the search compares: with `engine: auto` rarely all."""
    return [*dict.fromkeys(pair.engine for pair in model_rules.able_pairs(found.job))]


def why(found: Search) -> str:
    """How the layout was chosen, and what the fastest one would gain."""
    best = found.best
    if not found.fits:
        return "choice: the layout nearest to fitting"
    able = "fits with a margin of memory" if best.room == "fits" else "fits"
    fastest = next(one for one in found.ranked if one.room in (best.room, "fits"))
    gain = 1 - fastest.step_s / best.step_s
    by_auto = found.job.parallel.engine == "auto"
    layout = f"{' or '.join(compared_engines(found))} layout" if by_auto else "layout"
    if gain < LEAST_GAIN:
        return f"choice: the fastest {layout} that {able}"
    quicker = layout_text(*fastest.pair, fastest.layout)
    return (
        f"choice: the simplest {layout} that {able} and costs at most {WORTH:.0%} of speed; "
        f"the fastest one, {quicker}, takes {gain:.1%} less time"
    )


def _warnings(found: Search) -> Iterator[str]:
    job, best, capacity = found.job, found.best, found.best.capacity_gib
    for note in model_rules.position_notes(job.config, job.training.sequence_length):
        yield f"WARNING: {note}"
    if (outer := job.parallel.outer) is not None:
        size = byte_size(4 * (job.spec.trainable or job.spec.total))
        yield (
            f"WARNING: outer loop: {outer.replicas} replicas of "
            f"{job.training.global_batch_size} samples a step; each sends {size} every "
            f"{outer.every_steps} steps, and has its weights in fp32 up to four times more in "
            "host memory, spread over its ranks"
        )
    if best.layout.tp > 1 and found.cluster.island % best.layout.tp:
        yield (
            f"WARNING: tensor {best.layout.tp}: its groups reach across nodes, where every "
            "layer waits for the network"
        )
    if not found.fits:
        yield f"WARNING: does not fit: {over(found)}"
    elif capacity is not None and best.room == "tight":
        free = capacity / best.memory_gib - 1
        roomy = next(found.with_margin(found.ranked), None)
        other = "no layout leaves a margin"
        if roomy is not None:
            text = layout_text(*roomy.pair, roomy.layout)
            slower = roomy.step_s / best.step_s - 1
            other = f"{text} needs {roomy.memory_gib:.1f} GiB and is {slower:.0%} slower"
        yield (
            f"WARNING: memory is tight: {best.memory_gib:.1f} of {capacity:.4g} GiB leaves "
            f"{free:.1%}, less than the planner's error of {MARGIN:.0%}; {other}"
        )


def _pair(job: PlanRequest, pair: Pair) -> str:
    stated = [name for name in Pair._fields if getattr(job.parallel, name) != "auto"]
    if not stated:
        return f"{pair}: auto"
    asked = "asked for" if len(stated) == len(Pair._fields) else f"{stated[0]} asked for"
    return f"{pair}: {asked}"


def _note(job: PlanRequest, best: Estimate, one: Dimension) -> str:
    """What the layout's text does not say of a value, and why `auto` uses no other kernels."""
    layout, pair = best.layout, best.pair
    if one.field == "pp" and layout.pp > 1:
        return f"{division_text(stage_layers(job.spec.layers, *layout.division))} layers"
    if one.used(layout) or one.of(job) != "auto" or job.cluster.gpu == "cpu":
        return _UNMEASURED.get((one.field, getattr(layout, one.field)), "")
    degrees = {"tensor": layout.tp, "context": layout.cp, "expert": layout.ep}
    settled = job.asking(parallel=job.parallel.model_copy(update=degrees))
    if one.field == "compile":
        return kernels.compile_objection(settled, pair, layout.zero_stage)
    if one.field == "fused" and pair.model != "hf":
        return kernels.fused_objection(job, pair)
    if one.field == "experts" and job.spec.moe_layers:
        return kernels.experts_objection(job, pair, settled.parallel)
    return ""
