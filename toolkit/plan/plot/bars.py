"""Pictures of a plan: memory and step by part for each candidate, and the pipeline's timeline.

matplotlib is the optional extra `plot`; it is imported only when a picture is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import BackendUnavailable, PlanError
from toolkit.layout import Layout, recompute_text
from toolkit.plan.cost.memory import Memory
from toolkit.plan.cost.time import StepTime
from toolkit.system.install import install
from toolkit.units import GIB, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
SHOWN = 8
"""Candidates that a picture shows at most."""

# Okabe and Ito's colour-blind-safe palette; greys for what is neither work nor data.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PINK = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE = "#8C8C8C", "#E8E8E8"

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "svg.hashsalt": "dmt",  # the same plan gives the same file
}
_BARS_INCHES = 10.0
"""Width of the two panels of bars."""
_TITLE_PAD = 58
"""Points between the bars and their title: room for three lines of legend."""
_LETTER_INCHES = 0.085
"""Width of a letter of a bar's label."""
_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


@dataclass(frozen=True)
class PlottedLayout:
    """One layout in a picture."""

    label: str
    """Engine and model, e.g. `deepspeed/hf`."""
    layout: Layout
    memory: Memory
    time: StepTime | None
    """None where the device's speed is unknown."""
    capacity_gib: float | None
    """Memory of the device; None where there is no limit."""


@dataclass(frozen=True)
class BarSegment:
    """A segment of a stacked bar."""

    name: str
    colour: str
    size: float
    hatch: str = ""


def write_plot(file: Path, title: str, candidates: Sequence[PlottedLayout]) -> None:
    """Draw the candidates, best first, and the timeline of the first one.

    Raises PlanError when `file` is neither .svg nor .png or cannot be written,
    BackendUnavailable without matplotlib.
    """
    if file.suffix.lower() not in SUFFIXES:
        raise PlanError(
            f"--plot: cannot draw {file.name!r}; allowed: {' and '.join(SUFFIXES)}",
            fix=f"--plot {file.with_suffix('.svg').name}",
        )
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise BackendUnavailable(
            f"--plot: matplotlib cannot be imported ({error})", fix=install("plot")
        ) from error
    with rc_context(STYLE):
        figure = draw(title, candidates[:SHOWN])
        # Without a date, so that the same plan gives the same file.
        metadata = {"Date": None} if file.suffix.lower() == ".svg" else {}
        try:
            figure.savefig(file, dpi=150, metadata=metadata)
        except OSError as error:
            raise PlanError(
                f"--plot: cannot write {file}: {error}", fix="name a file"
            ) from error


def draw(title: str, candidates: Sequence[PlottedLayout]) -> "Figure":
    """The whole picture: bars above, the timeline of the first candidate below."""
    from matplotlib.figure import Figure

    from toolkit.plan.plot.timeline import draw_timeline, timeline_inches

    chosen = candidates[0]
    bars_inches = 2.1 + 0.5 * len(candidates)
    line_inches = timeline_inches(chosen.layout.pp) if chosen.time else 0.0
    height = bars_inches + line_inches
    names_inches = _names_inches(candidates)
    width = names_inches + _BARS_INCHES
    figure = Figure(figsize=(width, height))
    figure.suptitle(
        title, x=0.01, y=1 - 0.1 / height, ha="left", va="top", weight="bold", size=12
    )
    bottom = line_inches / height
    above = figure.add_gridspec(
        1, 2, left=names_inches / width, right=0.985, wspace=0.05,
        top=1 - 1.45 / height, bottom=bottom + 0.65 / height,
    )  # fmt: skip
    memory = figure.add_subplot(above[0, 0])
    _draw_memory(memory, candidates)
    step = figure.add_subplot(above[0, 1])
    _draw_steps(step, candidates)
    if chosen.time is not None:
        below = figure.add_gridspec(
            1, 1, left=0.07, right=0.985,
            top=bottom - 0.75 / height, bottom=0.5 / height,
        )  # fmt: skip
        draw_timeline(figure, below[0, 0], chosen.layout, chosen.time)
    return figure


def _names_inches(candidates: Sequence[PlottedLayout]) -> float:
    """Room for the candidates' names left of the bars."""
    lines = [line for one in candidates for line in name_of(one).splitlines()]
    bold = name_of(candidates[0]).splitlines()
    return 0.25 + max(0.068 * max(map(len, lines)), 0.08 * max(map(len, bold)))


def name_of(candidate: PlottedLayout) -> str:
    """Two lines: where ranks go, and what is saved."""
    layout = candidate.layout
    degrees = {
        "tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vpp": layout.vpp, "ep": layout.ep,
    }  # fmt: skip
    split = [f"{key} {value}" for key, value in degrees.items() if value > 1]
    saved = [f"zero {layout.zero_stage}", f"micro batch {layout.micro_batch}"]
    if layout.recompute != "none":
        saved.append(f"{recompute_text(layout)} recompute")
    if layout.offload_optimizer != "none":
        saved.append(f"offload to {layout.offload_optimizer}")
    engine, _, model = candidate.label.partition("/")
    label = engine if engine == model else candidate.label
    first = " · ".join([label, *split, f"dp {layout.dp:,}"])
    return f"{first}\n{' · '.join(saved)}"


def memory_parts(memory: Memory) -> list[BarSegment]:
    """What fills the device, in GiB; the parts add up to `memory.total`."""
    sizes = (
        ("weights", BLUE, memory.parameters, ""),
        ("gradients", SKY, memory.gradients, ""),
        ("optimizer", GREEN, memory.optimizer, ""),
        ("activations", ORANGE, memory.activations, ""),
        ("logits, one layer's backward", YELLOW, memory.logits + memory.workspace, ""),
        ("communication", PINK, memory.buffers, ""),
        ("allocator reserve, CUDA", PALE, memory.reserve + memory.context, "////"),
    )
    return [BarSegment(name, colour, size / GIB, hatch) for name, colour, size, hatch in sizes]


def step_parts(time: StepTime) -> list[BarSegment]:
    """The parts of one step, in seconds; they add up to `time.total_s`."""
    compute, sent = time.compute, time.communication
    layers = ("tensor", "context", "expert")
    return [
        BarSegment("forward, backward", BLUE, sum(compute.values()) - compute["recompute"]),
        BarSegment("recompute", SKY, compute["recompute"]),
        BarSegment("tensor, context, expert", ORANGE, sum(sent[kind] for kind in layers)),
        BarSegment("pipeline messages", RED, sent["pipeline"]),
        BarSegment("bubble", "white", time.bubble_s, "////"),
        BarSegment("data parallel", PINK, sent["data_gather"] + sent["data_reduce"]),
        BarSegment("optimizer, offload", GREEN, time.optimizer_s + time.offload_s),
        BarSegment("host, stragglers", PALE, time.overhead_s),
    ]


def _draw_memory(axes: "Axes", candidates: Sequence[PlottedLayout]) -> None:
    stacks = [memory_parts(candidate.memory) for candidate in candidates]
    _draw_stacks(axes, stacks)
    axes.set_yticks(range(len(candidates)), [name_of(one) for one in candidates])
    axes.get_yticklabels()[0].set_fontweight("bold")
    of = "process" if candidates[0].capacity_gib is None else "GPU"
    axes.set_title(f"Memory of the fullest {of}", pad=_TITLE_PAD)
    axes.set_xlabel("GiB")
    totals = [candidate.memory.total / GIB for candidate in candidates]
    widest = max(totals)
    capacity = candidates[0].capacity_gib
    if capacity is not None:
        axes.axvline(capacity, color=BLACK, linestyle="--", linewidth=1.2)
        axes.text(
            capacity, 1.0, f"limit {capacity:g}", color=BLACK, ha="center", va="bottom",
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        widest = max(widest, capacity)
    some_over = capacity is not None and max(totals) > capacity
    axes.set_xlim(0, _with_room(axes, widest, 1.5 if some_over else 0.6))
    for row, total in enumerate(totals):
        over = capacity is not None and total > capacity
        text = f"{total:.1f}" if total >= 1 else f"{total:.2g}"
        text += " does not fit" if over else ""
        at = total
        if capacity is not None and not over:
            wide = axes.get_xlim()[1] * (_LETTER_INCHES * len(text) + 0.1) / _inches(axes)
            at = capacity if total + wide > capacity else total  # not across the limit
        axes.annotate(
            text, (at, row), (5, 0), textcoords="offset points", va="center",
            weight="bold" if over else "normal", bbox=_ON_WHITE,
        )  # fmt: skip


def _draw_steps(axes: "Axes", candidates: Sequence[PlottedLayout]) -> None:
    times = [candidate.time for candidate in candidates]
    known = [time for time in times if time is not None]
    axes.set_title("One step", pad=_TITLE_PAD)
    axes.set_yticks([])
    if not known:
        axes.text(0.5, 0.5, "speed unknown", ha="center", transform=axes.transAxes)
        return
    _draw_stacks(axes, [step_parts(time) if time else [] for time in times])
    label_seconds(axes, max(time.total_s for time in known))
    axes.set_ylim(len(candidates) - 0.5, -0.5)
    for row, time in enumerate(times):
        if time is not None:
            mfu = "" if time.mfu_causal is None else f", MFU {time.mfu_causal:.0%}"
            axes.text(time.total_s, row, f" {seconds(time.total_s)}{mfu}", va="center")
    axes.set_xlim(0, _with_room(axes, max(time.total_s for time in known), 1.3))


def _with_room(axes: "Axes", longest: float, inches: float) -> float:
    """The end of an axis that leaves this much room for text after the longest bar."""
    return longest / (1 - inches / _inches(axes))


def _inches(axes: "Axes") -> float:
    return float(axes.get_window_extent().width / axes.figure.get_dpi())


def label_seconds(axes: "Axes", longest_s: float, since: str = "") -> None:
    """The unit of an axis of seconds: milliseconds if all of it is below one."""
    factor, unit = (1, "seconds") if longest_s >= 1 else (1e3, "milliseconds")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value * factor:,.10g}")
    axes.set_xlabel(f"{unit}{since}", loc="right" if since else "center")


def _draw_stacks(axes: "Axes", stacks: Sequence[Sequence[BarSegment]]) -> None:
    """One horizontal bar per stack, the first on top; parts without any value are omitted."""
    largest = max(sum(part.size for part in parts) for parts in stacks)
    shown: dict[str, Any] = {}
    for row, parts in enumerate(stacks):
        left = 0.0
        for part in parts:
            if part.size > 1e-3 * largest:
                bar = axes.barh(
                    row, part.size, 0.62, left, color=part.colour, hatch=part.hatch,
                    edgecolor=GREY if part.hatch else "white", linewidth=0.6,
                )  # fmt: skip
                shown.setdefault(part.name, bar)
            left += part.size
    # In the order of the parts, whichever bar had them first.
    order = dict.fromkeys(part.name for parts in stacks for part in parts)
    names = [name for name in order if name in shown]
    axes.legend(
        [shown[name] for name in names], names, loc="lower left", bbox_to_anchor=(-0.01, 1.0),
        ncols=3, frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.0,
        borderaxespad=1.8,
    )  # fmt: skip
    axes.set_ylim(len(stacks) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
