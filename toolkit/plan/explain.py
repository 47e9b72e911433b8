"""Explains the choice of a layout: for each decision, the cost of the alternatives.

Every figure comes from layouts that the search evaluated, or from the chosen layout with
this one decision changed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from toolkit.backend import Pair
from toolkit.layout import SETTINGS, Layout, stage_layers
from toolkit.plan.rules import compiling, experts, fusing
from toolkit.plan.rules.legality import table
from toolkit.plan.rules.models import PlanRequest
from toolkit.plan.search import Candidate, Search, evaluate, shortage

SHOWN = 2
"""Alternatives of a decision that its reason names."""
NAMES: Mapping[str, str] = {
    "tp": "tensor",
    "sequence_parallel": "sequence parallel",
    "pp": "pipeline",
    "vpp": "virtual pipeline",
    "ep": "expert",
    "zero_stage": "zero",
    "replicate": "replicate",
    "hpz": "hpz",
    "offload_optimizer": "offload of the optimizer",
    "offload_parameters": "offload of parameters",
    "micro_batch": "micro batch",
    "recompute": "recompute",
    "loss": "loss",
    "compile": "compile",
    "fused": "fused",
    "experts": "experts",
}
"""Decided fields of a layout, by their names in a recipe and in the order shown."""
_BY_ITSELF = (
    "recompute",
    "loss",
    "compile",
    "fused",
    "experts",
    "zero_stage",
    "sequence_parallel",
)
"""Decisions that are changed alone, if that fits, to compute their cost."""
ACROSS_NODES = "WARNING: its groups reach across nodes, where every layer waits for the network"


@dataclass(frozen=True)
class Decision:
    """One decision of a plan."""

    what: str
    """`tensor 8`."""
    why: str
    """`asked for`, or the reason."""
    alternatives: tuple[str, ...]
    """The cost of each other value, the nearest ones first."""

    @property
    def reason(self) -> str:
        """The decision in one line."""
        return "; ".join((f"{self.what}: {self.why}", *self.alternatives[:SHOWN]))


def decisions(search: Search) -> list[Decision]:
    """Every decision of the search's best layout."""
    layout = search.best.layout
    found = [_pair(search)]
    for field in NAMES:
        if _is_open(search, field) or getattr(layout, field) != getattr(Layout(), field):
            found.append(_decision(search, field))
    return found


def _is_open(search: Search, field: str) -> bool:
    """Whether the chosen pair has an alternative here."""
    support, layout = table()[search.best.pair], search.best.layout
    return {
        "tp": support.tensor > 1,
        "sequence_parallel": layout.tp > 1,
        "pp": support.pipeline > 1,
        "vpp": layout.pp > 1,
        "ep": support.expert > 1 and search.job.spec.moe_layers > 0,
        "zero_stage": True,
        "replicate": support.replicate > 1 and layout.dp > 1,
        "micro_batch": True,
        "recompute": True,
        "loss": search.cluster.gpu.memory_gib is not None,
        "fused": search.cluster.gpu.memory_gib is not None and search.best.pair.model != "hf",
        "compile": search.cluster.gpu.memory_gib is not None and bool(support.kernel_stages),
        "experts": search.cluster.gpu.memory_gib is not None
        and search.best.pair.model != "hf"
        and search.job.spec.moe_layers > 0,
    }.get(field, False)


def _pair(search: Search) -> Decision:
    best, asked = search.best, search.job.parallel
    others = _best_by(search, lambda one: one.pair)
    others.pop(best.pair)
    costs = [f"{other.pair} {_cost(search, other)}" for other in others.values()]
    stated = [name for name in Pair._fields if getattr(asked, name) != "auto"]
    why = "auto; the only one that can do this"
    if len(stated) == len(Pair._fields):
        why = "asked for"
    elif stated:
        why = f"{stated[0]} asked for"
    elif costs:
        why = _auto(search)
    return Decision(str(best.pair), why, tuple(costs))


def _decision(search: Search, field: str) -> Decision:
    """One field of the layout."""
    layout = search.best.layout
    chosen = getattr(layout, field)
    if _asked(search.job, field) != "auto":
        return Decision(_named(field, chosen), f"asked for{_note(search, field)}", ())
    others = _best_by(search, lambda one: getattr(one.layout, field), search.best.pair)
    values = {*others, *_further(search, field)} - {chosen}
    costs = []
    for value in sorted(values, key=lambda one: _distance(one, chosen)):
        if cost := _alternative(search, field, value, others.get(value)):
            costs.append(f"{_named(field, value)} {cost}")
    why = f"{_auto(search)}{_note(search, field)}"
    return Decision(_named(field, chosen), why, tuple(costs))


def _alternative(search: Search, field: str, value: Any, best: Candidate | None) -> str:
    """The cost of another value: changed alone, and with everything else chosen best for it."""
    alone = _alone(search, field, value)
    if alone is None or best is None:
        one = alone or best
        return "" if one is None else _cost(search, one, field)
    if best.step_s is None:  # nothing fits with this value: the smallest
        return _cost(search, best, field)
    if shortage(alone, search.cluster) is not None:
        changes = _changes(search, best, field)
        return f"{_needs(search, alone)} (or {_slower(search, best)} with {changes})"
    assert alone.step_s is not None, "evaluate times everything"
    by_itself = field in _BY_ITSELF or alone.step_s <= best.step_s
    return _cost(search, alone if by_itself else best, field)


def _alone(search: Search, field: str, value: Any) -> Candidate | None:
    """The best layout with one decision changed; None if there is none."""
    best, job = search.best, search.job
    changed = replace(best.layout, **{field: value})
    if field in ("tp", "pp"):
        if changed.tp == 1:
            changed = replace(changed, sequence_parallel=False)
        if changed.pp == 1:
            changed = replace(changed, vpp=1)
        ranks, rest = divmod(best.layout.world, changed.tp * changed.pp)
        changed = replace(changed, dp=ranks)
        if rest:
            return None
    steps, rest = divmod(job.training.global_batch_size, changed.dp * changed.micro_batch)
    interleaved = changed.vpp > 1 and (
        steps % changed.pp or changed.vpp * changed.pp > job.spec.layers
    )
    if rest or not steps or interleaved:
        return None
    workload = job.workload(best.pair)
    whole = replace(changed, gradient_accumulation=steps)
    return evaluate(best.pair, workload, whole, search.cluster)


def _best_by(
    search: Search, key: Callable[[Candidate], Any], pair: Pair | None = None
) -> dict[Any, Candidate]:
    """The best candidate of each value; if nothing fits with a value, the smallest one."""
    found: dict[Any, Candidate] = {}
    for one in search.fitting:
        if pair in (None, one.pair):
            found.setdefault(key(one), one)
    for one in sorted(search.too_large, key=lambda one: one.memory_gib):
        if pair in (None, one.pair):
            found.setdefault(key(one), one)
    return found


def _further(search: Search, field: str) -> tuple[Any, ...]:
    """Values that the search excludes because they cannot be best, but that users may ask
    about: recompute without need."""
    if field == "recompute":
        return table()[search.best.pair].recompute
    if field == "loss":
        return "whole", "chunked"
    if field in ("compile", "fused") and getattr(search.best.layout, field) != "none":
        return ("none",)
    if field == "experts" and search.best.layout.experts == "grouped":
        return ("sequential",)
    return ()


def _cost(search: Search, other: Candidate, field: str = "") -> str:
    """What another layout needs, or how much slower it is, and its other differences."""
    missing = shortage(other, search.cluster)
    if missing or other.step_s is None:
        return _needs(search, other)
    changes = _changes(search, other, field)
    slower = _slower(search, other)
    return f"{slower} (with {changes})" if changes else slower


def _needs(search: Search, other: Candidate) -> str:
    """What another layout needs of the scarce resource."""
    cluster, capacity = search.cluster, search.cluster.gpu.memory_gib
    if capacity is not None and other.memory_gib > capacity:
        return f"needs {other.memory_gib:.0f} GiB of {capacity:g}"
    if other.host_gib > cluster.host_memory_gib:
        return f"needs {other.host_gib:,.0f} GiB of {cluster.host_memory_gib:,g} on the host"
    return f"needs {other.nvme_gib:,.0f} GiB of {cluster.nvme_gib:,g} on the disks"


def _slower(search: Search, other: Candidate) -> str:
    """How much slower another layout is, or if equally fast, how its memory differs."""
    best = search.best
    if best.step_s is None or other.step_s is None:
        return "is not faster"
    relative = other.step_s / best.step_s - 1
    saved = best.memory_gib - other.memory_gib
    if abs(relative) < 0.0005:
        if abs(saved) < 0.05:
            return "is as fast and saves nothing"
        return f"is as fast and takes {abs(saved):.1f} GiB {'less' if saved > 0 else 'more'}"
    if relative < 0:
        more = f", but takes {-saved:.1f} GiB more" if saved < -0.05 else ""
        return f"is {-relative:.1%} faster{more}"
    return f"is {relative:.0%} slower" if relative >= 0.02 else f"is {relative:.1%} slower"


def _changes(search: Search, other: Candidate, field: str) -> str:
    """Other differences of another layout."""
    mine, theirs = search.best.layout, other.layout
    implied = {field}
    if field == "tp" and theirs.tp == 1:
        implied.add("sequence_parallel")
    if field == "pp" and theirs.pp == 1:
        implied.add("vpp")
    if other.pair != search.best.pair:
        return " and ".join(_strategy(theirs))
    return ", ".join(
        _named(name, getattr(theirs, name))
        for name in NAMES
        if name not in implied and getattr(mine, name) != getattr(theirs, name)
    )


def _strategy(layout: Layout) -> Iterator[str]:
    """The non-default parts of a layout, and always ZeRO."""
    plain = Layout()
    for name in NAMES:
        if name == "zero_stage" or (
            name not in ("micro_batch", "sequence_parallel")
            and getattr(layout, name) != getattr(plain, name)
        ):
            yield _named(name, getattr(layout, name))


def described(one: Candidate) -> str:
    """A whole layout in a few words."""
    return ", ".join((f"engine {one.pair.engine}", *_strategy(one.layout)))


def _named(field: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{NAMES[field]} {str(value).lower()}"
    return f"{NAMES[field]} {value}"


def _distance(value: Any, chosen: Any) -> tuple[float, str]:
    """Nearest values first."""
    if isinstance(value, bool) or not isinstance(value, int):
        return 0.0, str(value)
    larger, smaller = max(value, chosen, 1), max(1, min(value, chosen))
    return larger / smaller, str(value)


def _asked(job: PlanRequest, field: str) -> object:
    """What the recipe says about a field of the layout."""
    return attrgetter(SETTINGS[field])(job)


def _auto(search: Search) -> str:
    """The reason for a decision that the recipe leaves open."""
    if search.cluster.gpu.memory_gib is None and search.cluster.gpu.measured is None:
        return "auto, at nominal CPU speeds"
    return "auto"


def _note(search: Search, field: str) -> str:
    """Notes on the chosen value itself."""
    layout, job = search.best.layout, search.job
    if field == "tp" and layout.tp > 1 and search.cluster.island % layout.tp:
        return f"; {ACROSS_NODES}"
    uneven = job.uneven(layout.tp)
    if field == "sequence_parallel" and uneven is not None:
        return f"; tensor {layout.tp} does not divide {uneven:,} tokens"
    if field == "pp" and layout.pp > 1:
        return f"; {_counted(stage_layers(job.spec.layers, layout.pp, layout.vpp))} layers"
    if field == "ep" and layout.ep > 1:
        return f"; {job.spec.experts // layout.ep} experts per rank"
    if field == "micro_batch":
        rows = layout.micro_batch * job.training.rows_per_sample
        tokens = rows * job.training.sequence_length
        times = layout.gradient_accumulation
        often = "once" if times == 1 else f"{times} times"
        return f"; {tokens:,} tokens per forward pass, {often} a step{_idle(layout)}"
    if field == "compile" and layout.compile == "none" and job.kernels.compile == "auto":
        return f"; {compiling.objection(job, search.best.pair, layout.zero_stage)}"
    if field == "fused" and layout.fused == "none" and job.kernels.fused == "auto":
        return f"; {fusing.objection(job, search.best.pair)}"
    if field == "experts" and job.kernels.experts == "auto":
        settled = job.parallel.model_copy(update={"tensor": layout.tp, "expert": layout.ep})
        return f"; {experts.reason(job, search.best.pair, settled)}"
    if field.startswith("offload") and getattr(layout, field) != "none":
        return _why_offloaded(search) if _asked(job, field) == "auto" else ""
    return ""


def _why_offloaded(search: Search) -> str:
    """Why states are offloaded although the recipe leaves it open."""
    zero = search.job.parallel.zero
    stated = {zero.offload_optimizer, zero.offload_parameters} - {"auto"}
    if stated and table()[search.best.pair].offload_together:
        return "; the engine moves optimizer and parameters together"
    return "; nothing fits without"


def _idle(layout: Layout) -> str:
    """The pipeline's bubble (Narayanan et al., arXiv:2104.04473, section 2.2)."""
    if layout.pp == 1:
        return ""
    bubble = (layout.pp - 1) / (layout.vpp * layout.gradient_accumulation)
    return f"; the pipeline idles for {bubble:.0%} of the time that it computes"


def _counted(chunks: tuple[int, ...]) -> str:
    """(7, 8, 8, 7) → `7 + 2 × 8 + 7`."""
    runs: list[list[int]] = []
    for size in chunks:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return " + ".join(f"{count} × {size}" if count > 1 else str(size) for count, size in runs)
