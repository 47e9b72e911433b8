"""Numbers, bars, columns and lines in the commands' terminal output."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.text import Text

from toolkit.cli.console import Console
from toolkit.plan.estimate import Estimate, memory_parts
from toolkit.plan.search import Room
from toolkit.text.units import GIB, seconds, size

BAR_WIDTH = 24
"""Characters of a full bar."""
COLOURS: Mapping[Room, str] = {"fits": "green", "tight": "yellow", "does not fit": "red"}
"""Of what is said about a layout's memory."""
_HANGING = 6
"""Least indent of what a terminal has no room for on the first line."""


def bars(parts: Mapping[str, float], whole: float, unit: str) -> Iterator[Text]:
    """One line per part that is not zero; bars are shares of `whole`. Unit: GiB or s."""
    for part, amount in parts.items():
        if amount > 0:
            share = min(1.0, amount / whole)
            bar = "█" * round(share * BAR_WIDTH)
            shown = seconds(amount) if unit == "s" else size(amount)
            yield Text.assemble(f"    {part:<22}{shown:>10}  ", (bar, "cyan"))


def memory_lines(found: Estimate) -> Iterator[Text]:
    """Memory by part, and whether it fits."""
    capacity, total = found.setup.cluster.gpu.memory_gib, found.memory.total / GIB
    stage = f", pipeline stage {found.memory.stage}" if found.setup.layout.pp > 1 else ""
    if capacity is None:
        yield Text.assemble(("  memory per process", "dim"), f"  {size(total)}{stage}")
    else:
        verdict = (found.room, COLOURS[found.room])
        used = f"  {found.needed_gib:.1f} of {capacity:.4g} GiB: "
        yield Text.assemble(("  memory per GPU", "dim"), used, verdict, (stage, "dim"))
    yield from bars(memory_parts(found.memory), capacity or total, "GiB")
    if found.needed_gib > total * 1.001:
        yield Text(f"    {found.needed_gib:.1f} GiB while the model is built")
    for place, taken in (("host", found.host_gib), ("NVMe", found.nvme_gib)):
        if taken:
            yield Text(f"    {place} of each node: {taken:,.0f} GiB")


def columns(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> list[str]:
    """Rows in columns as wide as they must be, the first `left` to the left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def show(console: Console, lines: Iterable[str | Text]) -> None:
    """Lines for a terminal are wrapped with a hanging indent; in a file they are not."""
    for line in lines:
        text = Text(line) if isinstance(line, str) else line
        if not console.is_terminal or text.cell_len < console.width:
            console.print(text, soft_wrap=True)
            continue
        own = len(text.plain) - len(text.plain.lstrip())
        indent = Text(" " * max(own, _HANGING))
        first, *others = text.wrap(console, console.width - len(indent))
        console.print(first, *(indent + other for other in others), sep="\n", soft_wrap=True)


@contextmanager
def byte_progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, when that is a terminal; call the result with bytes done."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.progress import TransferSpeedColumn as Speed

    console = Console(stderr=True)
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(BAR_WIDTH), DownloadColumn(), Speed())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda done: bar.advance(task, done)


def print_hanging(console: Console, prefix: Text, body: str) -> None:
    """`prefix` and `body`; on a terminal, the rest is wrapped under the body's start."""
    lines = [Text(body)]
    if console.is_terminal:
        lines = list(lines[0].wrap(console, max(console.width - prefix.cell_len, 20)))
    for index, line in enumerate(lines):
        before = prefix if index == 0 else " " * prefix.cell_len
        line.rstrip()
        console.print(Text.assemble(before, line), soft_wrap=True)
