"""`dmt runs`: the runs in a folder, with their progress and state."""

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import AsJson
from toolkit.cli.output import Table, output
from toolkit.report.record import RunLine, find_runs, run_line
from toolkit.report.summary import RunState
from toolkit.text.terminal import printable
from toolkit.text.units import duration

_COLOURS: dict[RunState, str] = {
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
    remark=lambda run: run.why.replace("SIGTERM", "SIGTERM or Ctrl-C"),
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
    output(as_json, {"runs": found}, _TABLE.lines(found, lambda run: _COLOURS[run.state]))
