"""`dmt runs`: the runs in a folder, with their progress and state."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from toolkit.cli.bars import columns, show
from toolkit.cli.console import Console
from toolkit.cli.options import AsJson
from toolkit.report.record import RunState, find_runs, run_line
from toolkit.run import jsonl
from toolkit.terminal import printable
from toolkit.units import duration

COLOURS: dict[RunState, str] = {
    "running": "cyan",
    "stopped": "yellow",
    "failed": "red",
    "done": "green",
}


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Folder with run directories.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, the last one first: state, step, loss, and age.

    Example: `dmt runs runs`
    """
    found = [run_line(path) for path in find_runs(folder)]
    if as_json:
        typer.echo(json.dumps({"runs": jsonl.plain([asdict(one) for one in found])}))
        return
    rows = [["run", "state", "step", "loss", "last written"]]
    for one in found:
        loss = "-" if one.loss is None else f"{one.loss:#.5g}"
        rows.append(
            [printable(one.run), one.state, f"{one.step:,}", loss, f"{duration(one.age_s)} ago"]
        )
    header, *lines = columns(rows, left=2)
    show(Console(), [Text(header, "dim")])
    for one, line in zip(found, lines, strict=True):
        text = Text(line + (f"  {one.why}" if one.why else ""))
        text.highlight_words([f" {one.state} "], COLOURS[one.state])
        damage = [Text(f"  warning: {one.run}: {what}", "yellow") for what in one.damaged]
        show(Console(), [text, *damage])
