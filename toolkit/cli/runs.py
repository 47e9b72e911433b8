"""`dmt runs`: the runs in a folder, with their progress and state."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from toolkit.cli.options import AsJson
from toolkit.cli.output import Table, output
from toolkit.report.record import RunLine, find_runs, run_line
from toolkit.report.summary import RunState
from toolkit.text.terminal import printable
from toolkit.text.units import duration

COLOURS: dict[RunState, str] = {
    "running": "cyan",
    "stopped": "yellow",
    "failed": "red",
    "done": "green",
}
_TABLE = Table[RunLine](
    {
        "run": lambda run: printable(run.run),
        "state": lambda run: run.state,
        "step": lambda run: f"{run.step:,}",
        "loss": lambda run: "-" if run.loss is None else f"{run.loss:#.5g}",
        "last written": lambda run: f"{duration(run.age_s)} ago",
    },
    left=2,
)


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with run directories.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, the last one first: state, step, loss, and age.

    Example: `dmt runs runs`
    """
    found = [run_line(path) for path in find_runs(folder)]
    output(as_json, {"runs": found}, _lines(found))


def _lines(found: Sequence[RunLine]) -> Iterator[Text]:
    header, *lines = _TABLE.lines(found, lambda run: COLOURS[run.state])
    yield header
    for run, line in zip(found, lines, strict=True):
        if run.why:
            line.append(f"  {run.why.replace('SIGTERM', 'SIGTERM or Ctrl-C')}")
        yield line
