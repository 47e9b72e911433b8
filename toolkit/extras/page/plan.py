"""`dmt plan --html`: a plan as a page: the pipeline's timeline, memory and alternatives."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.cli.plan import layout_estimate, layout_facts
from toolkit.cli.plan_tables import strategies
from toolkit.extras.page import page_of_one, require_page, write
from toolkit.extras.page.timetable import Timetable, timetable
from toolkit.layout import Layout
from toolkit.plan.cost.time import StepTime
from toolkit.plan.dimensions import recompute_text
from toolkit.plan.estimate import Estimate, memory_parts
from toolkit.plan.planned import Planned
from toolkit.text.units import GIB, seconds, size

SHOWN = 8
"""Layouts on a page at most."""
_WINDOW_PASSES = 20
"""Passes of a rank that a part of a cut timeline shows beyond filling the pipeline."""

Stacks = dict[str, Any]
"""Bars of the same parts: `parts` (names), `rows` ([name, text, is it too large, sizes])
and `limit` ([size, text], or None)."""


class PlanPage:
    """The page that `--html` asks for."""

    def __init__(self, path: Path) -> None:
        """Raises DataError when `path` is another file, or in no folder."""
        require_page(path)
        self._path = path

    def write(self, planned: Planned) -> None:
        """Write it. Raises DataError when that is not possible."""
        write(plan_data(planned), self._path)


def plan_data(planned: Planned) -> dict[str, Any]:
    """Everything on the page, as JSON knows it, the chosen layout first."""
    search = planned.search
    shown = search.shortlist(SHOWN)
    labels = ["/".join(dict.fromkeys(one.pair)) for one in shown]
    estimates = [layout_estimate(search, one) for one in shown]
    names = [name_of(label, one.layout) for label, one in zip(labels, shown, strict=True)]
    chosen = estimates[0]
    facts = layout_facts(planned.plan, planned.recipe.cluster, planned.cluster.gpu)
    sections: list[dict[str, Any]] = [
        {"title": _memory_title(chosen), "stacks": memory_stacks(names, estimates)},
        {"title": "One step, by layout", "stacks": step_stacks(names, estimates)},
        {"title": "Alternatives", "table": strategies(search, shown).cells(shown)},
        {"title": "The chosen layout", "facts": [*map(list, facts)]},
        {"title": "Why", "items": list(planned.plan.reasons)},
    ]
    name = f"{planned.recipe.name} on {planned.cluster.name}"
    drawn = [*timelines(chosen.setup.layout, chosen.time)]
    page = page_of_one(name, chosen.room, "", _tiles(planned, chosen), sections)
    return page | {"plan": True, "timelines": drawn}


def _tiles(planned: Planned, chosen: Estimate) -> list[list[str]]:
    time, run = chosen.time, planned.run
    limit = chosen.needed.capacity_gib
    tiles = [
        ["memory", size(chosen.needed.memory_gib), "" if limit is None else f"of {limit:.4g}"],
        ["step", seconds(time.total_s), f"{chosen.setup.layout.global_batch:,} samples"],
        ["tokens/s", f"{time.tokens_per_s_per_gpu:,.0f}", "per rank"],
    ]
    if time.mfu_causal is not None:
        tiles.append(["MFU", f"{time.mfu_causal:.1%}", "attention as masked"])
    if run is not None:
        tiles.append(["run", run.duration, f"{run.steps:,} steps"])
    return tiles


def name_of(label: str, layout: Layout) -> str:
    """Two lines: where ranks go, and what is saved."""
    degrees = {
        "tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vpp": layout.vpp, "ep": layout.ep,
    }  # fmt: skip
    split = [f"{key} {value}" for key, value in degrees.items() if value > 1]
    saved = [f"zero {layout.zero_stage}", f"micro batch {layout.micro_batch}"]
    if layout.recompute != "none":
        saved.append(f"{recompute_text(layout)} recompute")
    if layout.offload_optimizer != "none":
        saved.append(f"offload to {layout.offload_optimizer}")
    return f"{' · '.join([label, *split, f'dp {layout.dp:,}'])}\n{' · '.join(saved)}"


def _memory_title(chosen: Estimate) -> str:
    limited = chosen.setup.cluster.gpu.memory_gib is not None
    return f"Memory of the fullest {'GPU' if limited else 'process'}, by layout"


def memory_stacks(names: Sequence[str], estimates: Sequence[Estimate]) -> Stacks:
    """Memory by part, in GiB, next to the device's."""
    limit_gib = estimates[0].needed.capacity_gib
    rows = []
    for name, one in zip(names, estimates, strict=True):
        total = one.memory.total / GIB
        too_large = limit_gib is not None and total > limit_gib
        text = size(total) + (", does not fit" if too_large else "")
        rows.append([name, text, too_large, [*memory_parts(one.memory).values()]])
    parts = [*memory_parts(estimates[0].memory)]
    limit = None if limit_gib is None else [limit_gib, f"limit {limit_gib:.4g} GiB"]
    return {"parts": parts, "rows": rows, "limit": limit}


def step_stacks(names: Sequence[str], estimates: Sequence[Estimate]) -> Stacks:
    """One step by part, in seconds."""
    rows = []
    for name, one in zip(names, estimates, strict=True):
        mfu = one.time.mfu_causal
        text = seconds(one.time.total_s) + ("" if mfu is None else f", MFU {mfu:.0%}")
        rows.append([name, text, False, [*step_parts(one.time).values()]])
    return {"parts": [*step_parts(estimates[0].time)], "rows": rows, "limit": None}


def step_parts(time: StepTime) -> dict[str, float]:
    """The parts of one step, in seconds; they add up to `time.total_s`."""
    compute, sent = time.compute, time.communication
    return {
        "forward, backward": sum(compute.values()) - compute["recompute"],
        "recompute": compute["recompute"],
        "tensor, context, expert": sent["tensor"] + sent["context"] + sent["expert"],
        "pipeline messages": sent["pipeline"],
        "pipeline bubble": time.bubble_s,
        "data parallel": sent["data_gather"] + sent["data_reduce"],
        "optimizer, offload": time.optimizer_s + time.offload_s,
        "host, stragglers": time.overhead_s,
    }


def timelines(layout: Layout, time: StepTime) -> Iterator[dict[str, Any]]:
    """What every stage does when; a long one is cut in the middle, where it is periodic."""
    table = timetable(time.passes, layout.gradient_accumulation, layout.vpp, time.message_s)
    spans = windows(table)
    count = layout.gradient_accumulation
    batches = f"{count} micro batch{'es' * (count > 1)}"
    titles = [f"One step of the chosen layout: {seconds(time.total_s)}, {batches}"]
    if len(spans) > 1:
        cut = seconds(spans[1][0] - spans[0][1])
        titles = [f"{titles[0]}: its beginning", f"Its end; {cut} of the same are left out"]
    for title, (start_s, stop_s) in zip(titles, spans, strict=True):
        yield {
            "title": title,
            "note": schedule(layout, time, table) if start_s == 0 else "",
            "stages": layout.pp,
            "window": [start_s, stop_s],
            "recompute": layout.recompute != "none",
            "chunks": layout.vpp,
            "slots": [
                slot
                for slots in table.slots
                for slot in slots
                if slot.sent_s > start_s and slot.start_s < stop_s
            ],
        }


def windows(table: Timetable) -> list[tuple[float, float]]:
    """The seconds that are shown: all, or the beginning and the end."""
    first = table.slots[0]
    filled_s = next(slot.start_s for slot in first if slot.direction == "backward")
    busy = [slot.sent_s - slot.start_s for slot in first]
    shown_s = filled_s + _WINDOW_PASSES * sum(busy) / len(busy)
    if 2 * shown_s > 0.85 * table.total_s:
        return [(0.0, table.total_s)]
    return [(0.0, shown_s), (table.total_s - shown_s, table.total_s)]


def schedule(layout: Layout, time: StepTime, table: Timetable) -> str:
    """A description of the pipeline, and the work of all ranks after its last pass."""
    idle = min(map(table.idle_s, range(layout.pp))) / table.total_s
    order = "1F1B" if layout.vpp == 1 else f"interleaved 1F1B with {layout.vpp} chunks a stage"
    pipeline = f"pipeline {order}, where the busiest stage is idle {idle:.1%} of the time"
    last = ("data parallel", "optimizer, offload", "host, stragglers")
    after = [f"{name} {seconds(step_parts(time)[name])}" for name in last
             if step_parts(time)[name]]  # fmt: skip
    what = pipeline if layout.pp > 1 else "no pipeline"
    return f"{what}; not drawn, after the last pass: {'; '.join(after) or 'nothing'}"
