"""The timeline of one step: what every pipeline stage does when."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from toolkit.layout import Layout
from toolkit.plan.cost.time import StepTime
from toolkit.plan.plot.bars import BLACK, GREY, ORANGE, SKY, label_seconds
from toolkit.plan.plot.timetable import Direction, Slot, Timetable, timetable
from toolkit.units import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

_COLOURS: dict[Direction, str] = {"forward": SKY, "backward": ORANGE}
_WINDOW_PASSES = 20
"""Passes of a rank that a part of a cut timeline shows beyond filling the pipeline."""
_DIGIT_INCHES = 0.075
"""Width of a digit of a micro batch's number."""


def timeline_inches(pp: int) -> float:
    """Height of the timeline of `pp` stages, title and legend included."""
    return 1.9 + max(0.5, min(5.0, 0.34 * pp))


def draw_timeline(
    figure: "Figure", where: "SubplotSpec", layout: Layout, time: StepTime
) -> None:
    """Draw the passes of `layout`; a long timeline is cut in the middle, where it is
    periodic."""
    table = timetable(time.stages, layout.gradient_accumulation, layout.vpp)
    windows = _windows(table)
    lengths = [stop - start for start, stop in windows]
    grid = where.subgridspec(1, len(windows), width_ratios=lengths, wspace=0.05)
    panels = [figure.add_subplot(grid[0, index]) for index in range(len(windows))]
    inches_per_s = 0.9 * figure.get_figwidth() / sum(lengths)
    for panel, window in zip(panels, windows, strict=True):
        _draw_panel(panel, table, window, inches_per_s)
    _label(panels, layout, time, table, windows)


def _windows(table: Timetable) -> list[tuple[float, float]]:
    """The seconds that are shown: all, or the beginning and the end."""
    first = table.slots[0]
    filled_s = next(slot.start_s for slot in first if slot.direction == "backward")
    busy = [slot.sent_s - slot.start_s for slot in first]
    shown_s = filled_s + _WINDOW_PASSES * sum(busy) / len(busy)
    if 2 * shown_s > 0.85 * table.total_s:
        return [(0.0, table.total_s)]
    return [(0.0, shown_s), (table.total_s - shown_s, table.total_s)]


def _draw_panel(
    axes: "Axes",
    table: Timetable,
    window: tuple[float, float],
    inches_per_s: float,
) -> None:
    start, stop = window
    pp = len(table.slots)
    for rank, slots in enumerate(table.slots):
        row = (rank - 0.4, 0.8)
        axes.broken_barh(
            [(start, stop - start)], row, facecolor="white", edgecolor=GREY, hatch="////",
            linewidth=0.3,
        )  # fmt: skip
        seen = [slot for slot in slots if slot.sent_s > start and slot.start_s < stop]
        _draw_passes(axes, seen, row, inches_per_s)
        whole = [slot for slot in seen if slot.start_s >= start and slot.end_s <= stop]
        _draw_numbers(axes, whole, inches_per_s)
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
    """Title, legend, stages, seconds, and how much was cut out."""
    batches, stages = layout.gradient_accumulation, range(layout.pp)
    count = f"{batches} micro batch{'es' * (batches > 1)}"
    title = f"One step of the chosen layout: {seconds(time.total_s)}, {count}"
    panels[0].set_title(title, pad=38)
    shown = stages[:: -(-layout.pp // 16)]
    names = [f"stage {stage}" for stage in shown] if layout.pp > 1 else ["every rank"]
    panels[0].set_yticks(shown, names)
    panels[0].tick_params(axis="y", length=0)
    for panel in panels[1:]:
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
    for panel in panels:
        label_seconds(panel, table.total_s, " since the step began")
    if len(panels) > 1:
        cut = seconds(windows[1][0] - windows[0][1])
        panels[0].set_xlabel(f"{cut} of the same are left out here ⋯", loc="right")
    handles = list(_legend(layout, time))
    panels[0].legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(handles),
        title=_schedule(layout, time, table), title_fontsize=8, alignment="left",
        frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _schedule(layout: Layout, time: StepTime, table: Timetable) -> str:
    """A description of the pipeline, and the work of all ranks after its last pass."""
    idle = min(map(table.idle_s, range(layout.pp))) / table.total_s
    order = "1F1B" if layout.vpp == 1 else f"interleaved 1F1B with {layout.vpp} chunks a stage"
    pipeline = f"pipeline {order}, where the busiest stage is idle {idle:.1%} of the time"
    sent = time.communication
    after = {
        "data parallel": sent["data_gather"] + sent["data_reduce"],
        "optimizer, offload": time.optimizer_s + time.offload_s,
        "host, stragglers": time.overhead_s,
    }
    parts = [f"{name} {seconds(took)}" for name, took in after.items() if took]
    what = pipeline if layout.pp > 1 else "no pipeline"
    return f"{what}; not drawn, after the last pass: {'; '.join(parts) or 'nothing'}"


def _legend(layout: Layout, time: StepTime) -> Iterator[object]:
    """A patch for each colour that occurs."""
    from matplotlib.patches import Patch

    again = "" if layout.recompute == "none" else " (with recompute)"
    yield Patch(facecolor=_COLOURS["forward"], label="forward")
    yield Patch(facecolor=_COLOURS["backward"], label=f"backward{again}")
    if layout.vpp > 1:
        yield Patch(facecolor=_shade(SKY, 1), label="every second chunk paler")
    if layout.pp > 1:
        if any(stage.message_s for stage in time.stages):
            yield Patch(facecolor=BLACK, label="message to the next stage")
        yield Patch(facecolor="white", edgecolor=GREY, hatch="////", label="bubble")
