"""`dmt watch --terminal`: the page's data as text, live; reads runs, writes nothing."""

import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from toolkit.cli.console import Console
from toolkit.cli.runs import COLOURS
from toolkit.extras.page.serve import LivePage

REFRESH_S = 1.0
_CHARTS = ("loss", "tokens_per_s", "step_time_s", "memory_gib")
_LAST_MARKS = 3
_BLOCKS = "▁▂▃▄▅▆▇█"
_LABEL_WIDTH, _VALUE_WIDTH, _UNIT_WIDTH = 16, 12, 18


def dashboard(data: Mapping[str, Any], width: int) -> Table:
    """The data of a page (`page_data`) in `width` columns."""
    parts: list[Table | Text] = []
    for number, run in enumerate(data["runs"]):
        state = (run["state"], COLOURS[run["state"]])
        why = f"  {run['why']}" if run["why"] else ""
        parts.append(Text.assemble((run["name"], "bold"), "  ", state, why))
        parts.append(_tiles(run["tiles"]))
        for chart in data["charts"]:
            if chart["id"] in _CHARTS:
                parts += _curves(chart, number, width)
        (summary,) = [one for one in run["sections"] if one["title"] == "Summary"]
        facts = [(label, text) for label, text in summary["facts"] if label in ("pace", "data")]
        for mark in run["marks"][-_LAST_MARKS:]:
            where = f"step {mark['step'] or 0:,.0f}"
            facts.append((mark["word"], f"{where}  {mark['time']}  {mark['what']}".rstrip()))
        facts += [("missing", what) for what in run["missing"]]
        parts += [Text.assemble((f"  {label:<13}", "dim"), text) for label, text in facts]
        parts.append(Text(""))
    return _stacked(parts)


def _stacked(parts: Iterable[Table | Text]) -> Table:
    found = Table.grid()
    for part in parts:
        found.add_row(part)
    return found


def _tiles(tiles: Sequence[Sequence[str]]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(*(Text(what, "dim") for what, _, _ in tiles))
    table.add_row(*(Text(amount, "bold") for _, amount, _ in tiles))
    table.add_row(*(Text(remark, "dim") for _, _, remark in tiles))
    return table


def _curves(chart: Mapping[str, Any], run: int, width: int) -> Iterator[Text]:
    """The measured curve of a run as a row of blocks, with its last value."""
    room = max(10, width - _LABEL_WIDTH - _VALUE_WIDTH - _UNIT_WIDTH - 5)
    unit = f" {chart['unit'].partition(',')[0]:.{_UNIT_WIDTH}}"
    for line in chart["lines"]:
        values = [value for value in line["y"] if value is not None]
        if line["run"] != run or line["label"] or not values:
            continue
        title = f"  {chart['title'].lower():<{_LABEL_WIDTH}.{_LABEL_WIDTH}}"
        last = f"{values[-1]:>{_VALUE_WIDTH},.5g}"
        yield Text.assemble(
            (title, "dim"), (sparkline(values, room), "cyan"), last, (unit, "dim")
        )


def sparkline(values: Sequence[float], room: int) -> str:
    """One letter for each of at most `room` equal parts of a curve, as high as its mean."""
    count = min(room, len(values))
    edges = [len(values) * at // count for at in range(count + 1)]
    means = [  # halved: differences of the largest floats are floats, too
        sum(value / (2 * (stop - start)) for value in values[start:stop])
        for start, stop in pairwise(edges)
    ]
    low, spread = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BLOCKS[round((mean - low) / spread * (len(_BLOCKS) - 1))] for mean in means)


def show_live(live: LivePage, console: Console) -> None:
    """Draw until q or Ctrl-C; once, where the output is no terminal.

    Raises DataError or OSError for a run that is gone.
    """
    if not console.is_terminal:
        console.print(dashboard(live.data(), console.width))
        return
    hint = Text("q or Ctrl-C closes this view; runs are not affected", "dim")
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as screen:
        try:
            while True:
                drawn = _stacked([hint, dashboard(live.data(), console.width)])
                screen.update(drawn, refresh=True)
                if "q" in pressed(REFRESH_S).lower():
                    return
        except KeyboardInterrupt:
            return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for keys, and returns those that were pressed."""
    import termios
    import tty

    source = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if source is None else termios.tcgetattr(source)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([] if source is None else [source], [], [], seconds)
        return os.read(ready[0], 100).decode(errors="replace") if ready else ""

    try:
        if source is not None:
            tty.setcbreak(source)
        yield pressed
    finally:
        if source is not None and before is not None:
            termios.tcsetattr(source, termios.TCSADRAIN, before)
