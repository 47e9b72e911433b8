"""The timeline of one step: what every pipeline rank does when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.plan.layout import Layout
from toolkit.plan.plot import BLACK, GREEN, GREY, ORANGE, PALE, PINK, SKY
from toolkit.plan.schedule import Direction, Slot, Timetable, timetable
from toolkit.plan.time import StepTime

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

_COLOURS: dict[Direction, str] = {"forward": SKY, "backward": ORANGE}
_WINDOW_PASSES = 20
"""Passes of a rank that a part of a cut timeline shows beyond filling the pipeline."""
_DIGIT_INCHES = 0.075
"""Width of a digit of a micro batch's number."""


@dataclass(frozen=True)
class _Tail:
    """What all ranks do after the last backward pass."""

    name: str
    colour: str
    seconds: float


def timeline_inches(pp: int) -> float:
    """Height of the timeline of `pp` pipeline ranks, title and legend included."""
    return 1.5 + max(0.5, min(5.0, 0.34 * pp))


def draw_timeline(
    figure: "Figure", where: "SubplotSpec", layout: Layout, time: StepTime
) -> None:
    """Draw the step of `layout`; a long one is cut in the middle, where it repeats itself."""
    table = timetable(time.stages, layout.gradient_accumulation, layout.vpp)
    tail = _tail(time)
    end_s = table.total_s + sum(part.seconds for part in tail)
    windows = _windows(table, end_s)
    lengths = [stop - start for start, stop in windows]
    grid = where.subgridspec(1, len(windows), width_ratios=lengths, wspace=0.05)
    panels = [figure.add_subplot(grid[0, index]) for index in range(len(windows))]
    inches_per_s = 0.9 * figure.get_figwidth() / sum(lengths)
    for panel, (start, stop) in zip(panels, windows, strict=True):
        _draw_panel(panel, table, tail, (start, stop), inches_per_s)
    _label(panels, layout, time, table, windows)


def _tail(time: StepTime) -> list[_Tail]:
    sent = time.communication
    return [
        _Tail("data parallel", PINK, sent["data_gather"] + sent["data_reduce"]),
        _Tail("optimizer, offload", GREEN, time.optimizer_s + time.offload_s),
        _Tail("host, stragglers", PALE, time.overhead_s),
    ]


def _windows(table: Timetable, end_s: float) -> list[tuple[float, float]]:
    """The seconds that are shown: all, or the beginning and the end."""
    first = table.slots[0]
    filled_s = next(slot.start_s for slot in first if slot.direction == "backward")
    busy = [slot.sent_s - slot.start_s for slot in first]
    shown_s = filled_s + _WINDOW_PASSES * sum(busy) / len(busy)
    closing_s = end_s - table.total_s + shown_s
    if shown_s + closing_s > 0.85 * end_s:
        return [(0.0, end_s)]
    return [(0.0, shown_s), (end_s - closing_s, end_s)]


def _draw_panel(
    axes: "Axes",
    table: Timetable,
    tail: Sequence[_Tail],
    window: tuple[float, float],
    inches_per_s: float,
) -> None:
    start, stop = window
    pp = len(table.slots)
    ends = min(stop, table.total_s)
    for rank, slots in enumerate(table.slots):
        row = (rank - 0.4, 0.8)
        axes.broken_barh(
            [(start, ends - start)], row, facecolor="white", edgecolor=GREY, hatch="////",
            linewidth=0.3,
        )  # fmt: skip
        seen = [slot for slot in slots if slot.sent_s > start and slot.start_s < stop]
        _draw_passes(axes, seen, row, inches_per_s)
        whole = [slot for slot in seen if slot.start_s >= start and slot.end_s <= stop]
        _draw_numbers(axes, whole, inches_per_s)
    at = table.total_s
    for part in tail:
        axes.broken_barh([(at, part.seconds)], (-0.4, pp - 0.2), facecolor=part.colour)
        at += part.seconds
    axes.set_xlim(start, stop)
    axes.set_ylim(pp - 0.45, -0.55)


def _draw_passes(
    axes: "Axes", slots: Sequence[Slot], row: tuple[float, float], inches_per_s: float
) -> None:
    """Passes and messages of one rank."""
    colours = [_shade(_COLOURS[slot.direction], slot.chunk) for slot in slots]
    spans = [(slot.start_s, slot.end_s - slot.start_s) for slot in slots]
    wide = bool(spans) and min(width for _, width in spans) * inches_per_s > 0.03
    edge = {"edgecolor": "white", "linewidth": 0.5} if wide else {"linewidth": 0.0}
    axes.broken_barh(spans, row, facecolors=colours, **edge)
    messages = [(slot.end_s, slot.sent_s - slot.end_s) for slot in slots]
    axes.broken_barh(messages, row, facecolor=BLACK, linewidth=0, snap=False)


def _draw_numbers(axes: "Axes", slots: Sequence[Slot], inches_per_s: float) -> None:
    """The micro batch of every pass that has room for it."""
    for slot in slots:
        number = str(slot.micro_batch + 1)
        if (slot.end_s - slot.start_s) * inches_per_s > _DIGIT_INCHES * (len(number) + 0.5):
            axes.text(
                (slot.start_s + slot.end_s) / 2, slot.rank, number, ha="center",
                va="center_baseline", size=7.5,
            )  # fmt: skip


def _shade(colour: str, chunk: int) -> str:
    """Every second chunk of a rank is paler."""
    if chunk % 2 == 0:
        return colour
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{(part + 255) // 2:02x}" for part in parts)


def _label(
    panels: Sequence["Axes"],
    layout: Layout,
    time: StepTime,
    table: Timetable,
    windows: Sequence[tuple[float, float]],
) -> None:
    """Title, legend, ranks, seconds, and how much was cut out."""
    idle = min(table.idle_s(rank) for rank in range(layout.pp)) / table.total_s
    schedule = "1F1B" if layout.vpp == 1 else f"interleaved, {layout.vpp} chunks per rank"
    name = f"pipeline {schedule}; the busiest rank idles {idle:.0%} of it"
    if layout.pp == 1:
        name = "no pipeline"
    batches = layout.gradient_accumulation
    count = f"{batches} micro batch{'es' * (batches > 1)}"
    title = f"One step of the chosen layout: {time.total_s:.3g} s, {count}, {name}"
    panels[0].set_title(title, pad=24)
    every = -(-layout.pp // 16)
    ranks = range(0, layout.pp, every)
    panels[0].set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    panels[0].tick_params(axis="y", length=0)
    for panel in panels[1:]:
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
    if len(panels) > 1:
        cut = windows[1][0] - windows[0][1]
        panels[0].set_xlabel(f"{cut:.3g} s of the same are left out here ⋯", loc="right")
    panels[-1].set_xlabel("seconds since the step began", loc="right")
    handles = list(_legend(layout, time, table))
    panels[0].legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(handles),
        frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _legend(layout: Layout, time: StepTime, table: Timetable) -> Iterator[object]:
    """A patch for each colour that is there."""
    from matplotlib.patches import Patch

    again = "" if layout.recompute == "none" else " (with recompute)"
    yield Patch(facecolor=_COLOURS["forward"], label="forward")
    yield Patch(facecolor=_COLOURS["backward"], label=f"backward{again}")
    if layout.vpp > 1:
        yield Patch(facecolor=_shade(SKY, 1), label="every second chunk paler")
    if layout.pp > 1:
        if any(stage.message_s for stage in time.stages):
            yield Patch(facecolor=BLACK, label="message to the neighbour")
        yield Patch(facecolor="white", edgecolor=GREY, hatch="////", label="bubble")
    for part in _tail(time):
        if part.seconds > 1e-3 * table.total_s:
            yield Patch(facecolor=part.colour, label=part.name)
