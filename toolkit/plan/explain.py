"""Explains the choice of a layout. What another value would cost is what the planner answers
to a recipe that states it (`what_if`)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import PlanError
from toolkit.hardware.cluster import Cluster
from toolkit.layout import Layout, Pair, stage_layers
from toolkit.plan import context_notes
from toolkit.plan.dimensions import (
    DIMENSION,
    IN_REASONS,
    Choice,
    Dimension,
    division_text,
    layout_text,
)
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import kernels, legality
from toolkit.plan.rules import models as model_rules
from toolkit.plan.rules.context import LONG
from toolkit.plan.rules.legality import table
from toolkit.plan.search import (
    MARGIN,
    TIE,
    Candidate,
    Search,
    room,
    search,
)

ACROSS_NODES = "WARNING: its groups reach across nodes, where every layer waits for the network"


@dataclass(frozen=True)
class Decision:
    """One decision of a plan."""

    what: str
    """`tensor 8`."""
    why: str
    """`asked for`, or the reason."""

    @property
    def reason(self) -> str:
        """The decision in one line."""
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class WhatIf:
    """What the planner chooses for a recipe that states another value of one setting."""

    setting: str
    """`parallel.tensor`."""
    value: Any
    best: Candidate


def what_if(found: Search, dimensions: Iterable[Dimension] = IN_REASONS) -> Iterator[WhatIf]:
    """For each decision left to the planner, the nearest lower and higher value, or each other
    value that is not a number."""
    choice = _choice(found)
    for dimension in dimensions:
        if not dimension.open(choice) or dimension.of(found.job) != "auto":
            continue
        chosen = getattr(found.best.layout, dimension.field)
        others = _others(found, dimension)
        if isinstance(chosen, int) and dimension.tried == "all":
            lower = [one for one in others if one < chosen]
            others = lower[-1:] + others[len(lower) :][:1]
        for value in others:
            # Layouts of the search itself would not do: among equally fast ones, the planner
            # may choose another when the setting is stated.
            if best := stated(found, {dimension.key: value}):
                yield WhatIf(dimension.key, value, best)


def decisions(found: Search) -> list[Decision]:
    """Every decision of the search's best layout."""
    choice, layout = _choice(found), found.best.layout
    shown = [one for one in IN_REASONS if one.open(choice) or one.used(layout)]
    return [_pair(found), *(decision(found, one) for one in shown)]


def _choice(found: Search) -> Choice:
    best, limited = found.best, found.cluster.gpu.memory_gib is not None
    support, asked = table()[best.pair], found.job.parallel.context
    contexts = asked == "auto" and support.largest("context") > 1
    return Choice(best.pair, best.layout, support, found.job.spec, limited, contexts)


def choice(found: Search) -> Iterator[str]:
    """How the layout was chosen, and how near its memory is to the limit."""
    best, cluster, capacity = found.best, found.cluster, found.best.capacity_gib
    if not found.fits or capacity is None:
        return
    first = found.equal[0]
    if best == first:
        margin = " with a margin of memory" if room(best, cluster) == "fits" else ""
        yield f"choice: the fastest of the layouts that fit{margin}"
    else:
        yield (
            f"choice: the simplest of {len(found.equal)} layouts whose predicted times differ "
            f"by less than the planner's error of {TIE:.0%}; the fastest of them is "
            f"{_text(first)}: {_faster(found, first)}"
        )
    free = capacity / best.memory_gib - 1
    state = f"{best.memory_gib:.1f} of {capacity:.4g} GiB"
    fastest = next(found.by_time())
    if room(best, cluster) == "fits":
        yield f"memory: {state} leaves more than the planner's error of {MARGIN:.0%}"
        if room(fastest, cluster) != "fits":
            yield (
                f"memory: not chosen: {_text(fastest)}, {_faster(found, fastest)}, needs "
                f"{fastest.memory_gib:.1f} GiB and leaves no such margin"
            )
        return
    other = "no layout leaves a margin"
    roomy = (one for one in found.by_time() if room(one, cluster) == "fits")
    if safest := next(roomy, None):
        other = (
            f"{_text(safest)} needs {safest.memory_gib:.1f} GiB and {_slower(found, safest)}"
        )
    yield (
        f"memory: WARNING: tight: {state} leaves {free:.1%}, less than the planner's error of "
        f"{MARGIN:.0%}; {other}"
    )


def _text(one: Candidate) -> str:
    return layout_text(one.pair.engine, one.pair.model, one.layout)


def _faster(found: Search, other: Candidate) -> str:
    """How much faster another layout is."""
    return f"{1 - (other.step_s or 0.0) / (found.best.step_s or 1.0):.1%} faster"


def answer(job: PlanRequest, cluster: Cluster) -> Search | None:
    """The search for a job; None if it is refused, or has no layout."""
    if legality.problems(job.parallel, job.cluster) or model_rules.problems(job):
        return None
    try:
        return search(job, cluster)
    except PlanError:
        return None


def stated(found: Search, values: Mapping[str, Any]) -> Candidate | None:
    """What the planner chooses for a recipe with these values; None if it cannot."""
    answered = answer(found.job.stating(values), found.cluster)
    return None if answered is None else answered.best


def _pair(found: Search) -> Decision:
    best, asked = found.best, found.job.parallel
    stated = [name for name in Pair._fields if getattr(asked, name) != "auto"]
    why = "auto; the only one that can do this"
    if len(stated) == len(Pair._fields):
        why = "asked for"
    elif stated:
        why = f"{stated[0]} asked for"
    elif any(one.partial.pair != best.pair for one in found.splits):
        why = _auto(found)
    return Decision(str(best.pair), why)


def decision(found: Search, dimension: Dimension) -> Decision:
    """The decision about one dimension of the layout."""
    chosen = getattr(found.best.layout, dimension.field)
    what, note = dimension.named(chosen), _note(found, dimension.field)
    auto = dimension.of(found.job) == "auto"
    return Decision(what, f"{_auto(found) if auto else 'asked for'}{note}")


def _others(found: Search, dimension: Dimension) -> list[Any]:
    """Other values of a decision, ascending. Of recompute no numbers of layers: each layout has
    its own."""
    field = dimension.field
    seen = {getattr(one.partial.layout, field) for one in found.splits}
    if field == "micro_batch":
        seen = {size for one in found.splits for size in one.partial.micro_batches}
    values = {*seen, *dimension.unneeded(_choice(found))} - {getattr(found.best.layout, field)}
    return sorted(one for one in values if field != "recompute" or isinstance(one, str))


def _slower(found: Search, other: Candidate) -> str:
    """How much slower another layout is, or if equally fast, how its memory differs."""
    best = found.best
    if not found.fits or best.step_s is None or other.step_s is None:
        return f"needs {other.memory_gib:.1f} GiB"
    relative = other.step_s / best.step_s - 1
    more = other.memory_gib - best.memory_gib
    if abs(relative) < 0.0005:
        if abs(more) < 0.05:
            return "is as fast and saves nothing"
        return f"is as fast and takes {abs(more):.1f} GiB {'more' if more > 0 else 'less'}"
    if relative < 0:
        return f"is {-relative:.1%} faster{f', but takes {more:.1f} GiB more' * (more > 0.05)}"
    return f"is {relative:.0%} slower" if relative >= 0.02 else f"is {relative:.1%} slower"


def _strategy(layout: Layout) -> Iterator[str]:
    """The non-default parts of a layout, and always ZeRO."""
    for one in IN_REASONS:
        shown = one.field not in ("micro_batch", "sequence_parallel") and one.used(layout)
        if one.field == "zero_stage" or shown:
            yield one.named(getattr(layout, one.field))


def described(one: Candidate) -> str:
    """A whole layout in a few words."""
    return ", ".join((f"engine {one.pair.engine}", *_strategy(one.layout)))


def _auto(found: Search) -> str:
    """The reason for a decision that the recipe leaves open."""
    if found.cluster.gpu.memory_gib is None and found.cluster.gpu.measured is None:
        return "auto, at nominal CPU speeds"
    return "auto"


def _note(found: Search, field: str) -> str:
    """Notes on the chosen value itself."""
    layout, job = found.best.layout, found.job
    if field == "tp" and layout.tp > 1 and found.cluster.island % layout.tp:
        return f"; {ACROSS_NODES}"
    length = job.training.sequence_length
    if field == "sequence_parallel" and length % layout.tp:
        return f"; tensor {layout.tp} does not divide {length:,} tokens"
    if field == "pp" and layout.pp > 1:
        return f"; {division_text(stage_layers(job.spec.layers, *layout.division))} layers"
    if field == "recompute" and isinstance(layout.recompute, int):
        sizes = stage_layers(job.spec.layers, *layout.division)
        whole = "each pipeline chunk" if layout.pp > 1 else "the model"
        return f"; of the {max(sizes)} of {whole}"
    if field in ("cp", "exchange") and layout.cp > 1:
        return (context_notes.exchanged if field == "cp" else context_notes.kept)(found)
    if field == "cp" and not found.fallback.context:
        return f"; rows of fewer than {LONG:,} tokens are spread only if nothing fits otherwise"
    if field == "cp" and job.parallel.context == "auto":
        return context_notes.refused(found)
    if field == "ep" and layout.ep > 1:
        return f"; {job.spec.experts // layout.ep} experts per rank"
    if field == "micro_batch":
        rows = layout.micro_batch * job.training.rows_per_sample
        tokens = rows * job.training.sequence_length
        times = layout.gradient_accumulation
        often = "once" if times == 1 else f"{times} times"
        return f"; {tokens:,} tokens per forward pass, {often} a step{_idle(layout)}"
    if field == "compile" and layout.compile == "none" and job.kernels.compile == "auto":
        job = job.stating({"parallel.context": layout.cp})
        return f"; {kernels.compile_objection(job, found.best.pair, layout.zero_stage)}"
    if field == "fused" and layout.fused == "none" and job.kernels.fused == "auto":
        return f"; {kernels.fused_objection(job, found.best.pair)}"
    if field == "loss" and layout.loss == "liger":
        return "; planned as long as chunks; not measured with a loss per token"
    if field == "fused" and layout.fused == "liger":
        return "; planned as one kernel each, as when compiled; not measured on a GPU"
    if field == "experts" and job.kernels.experts == "auto":
        settled = job.parallel.model_copy(update={"tensor": layout.tp, "expert": layout.ep})
        return f"; {kernels.experts_reason(job, found.best.pair, settled)}"
    if field == "offload_activations":
        return "; planned as copied while layers are computed; not measured on a GPU"
    if field == "mlp":
        return "; a chunk's forward pass is computed again in its backward pass"
    if field.startswith("offload") and getattr(layout, field) != "none":
        return _why_offloaded(found) if DIMENSION[field].of(job) == "auto" else ""
    return ""


def _why_offloaded(found: Search) -> str:
    """Why states are offloaded although the recipe leaves it open."""
    zero = found.job.parallel.zero
    stated = {zero.offload_optimizer, zero.offload_parameters} - {"auto"}
    if stated and table()[found.best.pair].offload_together:
        return "; the engine moves optimizer and parameters together"
    return "; without it nothing is as fast with a margin of memory"


def _idle(layout: Layout) -> str:
    """The pipeline's bubble (Narayanan et al., arXiv:2104.04473, section 2.2)."""
    if layout.pp == 1:
        return ""
    bubble = (layout.pp - 1) / (layout.vpp * layout.gradient_accumulation)
    return f"; the pipeline idles for {bubble:.0%} of the time that it computes"
