"""Bars in the commands' terminal output."""

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

from rich.text import Text

from toolkit.cli.console import Console
from toolkit.plan.estimate import Estimate, Room, memory_parts
from toolkit.system.handlers import handling
from toolkit.text.units import GIB, seconds, size

BAR_WIDTH = 24
"""Characters of a full bar."""
_COLUMN, _NAMES, _SHORT = 40, 22, 7
"""Characters of a column, and of a name and a full bar in it."""
_SMALL = 0.01
"""Parts below this share of the whole are one line."""
COLOURS: Mapping[Room, str] = {"fits": "green", "tight": "yellow", "does not fit": "red"}
"""Colours of a verdict on a layout's memory."""


def bars(
    parts: Mapping[str, float], whole: float, unit: str, names: int = 26, full: int = BAR_WIDTH
) -> Iterator[Text]:
    """One line per part that is not zero; bars are shares of `whole`. Unit: GiB or s; `names`
    and `full`: characters of a name and of a full bar."""
    for part, amount in parts.items():
        if amount > 0:
            bar = "█" * round(min(1.0, amount / whole) * full)
            shown = seconds(amount) if unit == "s" else size(amount)
            name = f"  {part.replace('_', ' ')}"
            yield Text.assemble(f"{name:<{names}}{shown:>10} ", (bar, "cyan"))


def memory_lines(found: Estimate) -> Iterator[Text]:
    """Memory by part, and whether it fits."""
    needed, total, capacity = found.memory_gib, found.memory.total / GIB, found.capacity_gib
    stage = f", pipeline stage {found.memory.stage}" if found.layout.pp > 1 else ""
    if capacity is None:
        yield Text.assemble(("  memory per process", "dim"), f"  {size(total)}{stage}")
    else:
        free = 1 - needed / capacity
        verdict = f"{free:.0%} free" if found.fits else found.room
        used = f"  {needed:.1f} of {capacity:.4g} GiB, "
        yield Text.assemble(
            ("  memory", "dim"), used, (verdict, COLOURS[found.room]), (stage, "dim")
        )
    parts = _large(memory_parts(found.memory), total)
    yield from bars(parts, capacity or total, "GiB", _NAMES, _SHORT)
    if needed > total * 1.001:
        yield Text(f"  {needed:.1f} GiB while the model is built")
    for place, taken in (("host", found.host_gib), ("NVMe", found.nvme_gib)):
        if taken:
            yield Text(f"  {place} of each node: {taken:,.0f} GiB")


def time_lines(found: Estimate) -> Iterator[Text]:
    """A step's parts."""
    total_s = found.time.total_s
    yield Text.assemble(("  time of a step", "dim"), f"  {seconds(total_s)}")
    parts = _large(found.time.parts, total_s)
    yield from bars(parts, total_s, "s", _NAMES, _SHORT)


def _large(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Parts by size, the small ones as their sum."""
    large = {part: one for part, one in parts.items() if one >= _SMALL * whole}
    return large | {"other": sum(parts.values()) - sum(large.values())}


def side_by_side(left: Iterable[Text], right: Iterable[Text]) -> Iterator[Text]:
    """Two columns on 80 characters."""
    for one, other in zip_longest(left, right, fillvalue=Text()):
        padding = " " * max(2, _COLUMN - one.cell_len)
        line = Text.assemble(one, padding, other) if other.cell_len else one
        line.rstrip()
        yield line


@contextmanager
def count_progress(total: int, kind: str = "") -> Iterator[Callable[..., None]]:
    """How many of `total` are done, on standard error where that is a terminal; call the result
    with what rich's `Progress.update` takes. SIGTERM cleans up as Ctrl-C does."""
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), MofNCompleteColumn(), TextColumn(f"{kind}{{task.description}}")
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with handling([signal.SIGTERM], signal.default_int_handler), bar:
        yield partial(bar.update, bar.add_task("", total=total))


@contextmanager
def byte_progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, when that is a terminal; call the result with bytes done."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.progress import TransferSpeedColumn as Speed

    console = Console(stderr=True)
    if not console.is_terminal:  # rich 14.0 prints a line even if it is disabled
        yield lambda _: None
        return
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(BAR_WIDTH), DownloadColumn(), Speed())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda done: bar.advance(task, done)
