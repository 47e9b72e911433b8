"""`dmt report`: what a run did and where its time went, or what differs between runs, from
their run directories alone."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from toolkit.cli.options import AsJson
from toolkit.cli.output import Console, columns, output
from toolkit.errors import DataError
from toolkit.registry import load
from toolkit.report.compare import (
    difference,
    median_speed,
    names_of,
    settings_that_differ,
)
from toolkit.report.goodput import PARTS, Goodput
from toolkit.report.record import RunRecord, find_runs, read_record
from toolkit.run.changes import is_stated, shown
from toolkit.run.comparison import summary_numbers
from toolkit.text.terminal import tell
from toolkit.text.units import duration, shortened

_BAR_WIDTH = 24
"""Characters of a full bar."""


def report(
    run_dirs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Run directories. Default: the last one in runs/.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with curves instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run did, where its time went and how it ended, also while it runs.

    Several runs are compared with the first one.

    Example: `dmt report runs/tiny-llama-bytes --html report.html`

    Example: `dmt report runs/before runs/after`
    """
    if as_json and html is not None:
        raise DataError("--json and --html: one form at a time", fix="leave one out")
    runs = run_dirs or find_runs(Path("runs"))[:1]
    records = [read_record(path, with_environment=len(runs) > 1) for path in runs]
    if html is not None:
        load("toolkit.extras.page:write_page")(records, html)
        tell(f"report {html}: open it in a browser, it needs nothing else")
    elif len(records) > 1:
        data = _comparison_output(records) if as_json else None
        output(as_json, data, _comparison_lines(records))
    else:
        output(as_json, _machine_output(records[0]), _lines(records[0]))


def _machine_output(record: RunRecord) -> dict[str, Any]:
    """Output of `--json` for one run."""
    summary, spent = record.summary, record.spent
    fields = asdict(summary)
    first, last = summary.losses or (None, None)
    prediction = summary.prediction
    return fields | {
        "run": str(record.run.path),
        "state": summary.ending.state,
        "pace": record.pace,
        "tokens_per_s": median_speed(record.metrics),
        "goodput": spent.share,
        "total_s": spent.total_s,
        "idle_s": spent.idle_s,
        "time_s": dict(spent.parts_s),
        "losses": {"first": first and asdict(first), "last": last and asdict(last)},
        "prediction": None if prediction is None else summary_numbers(prediction),
    }


def _lines(record: RunRecord) -> Iterator[Text]:
    yield Text(str(record.run.path), "bold")
    for label, value in record.rows():
        yield Text.assemble((f"  {label:<13}", "dim"), value)
    yield Text("")
    yield from _time_lines(record.spent)


def _time_lines(spent: Goodput) -> Iterator[Text]:
    """Goodput, then a line for each part with a bar."""
    if spent.share is None:
        yield Text("  goodput: nothing to divide yet, the run has just begun")
        return
    shares, total = spent.percentages(), duration(spent.total_s)
    yield Text.assemble(("  goodput", "dim"), f"  {shares['productive']:.1f}% of {total}")
    for name, label in PARTS.items():
        bar = "█" * round(shares[name] / 100 * _BAR_WIDTH)
        row = f"    {label:<22}{duration(spent.parts_s[name]):>12}  {shares[name]:>5.1f}%"
        yield Text.assemble(row, (f"  {bar}" if bar else "", "cyan"))
    if spent.idle_s > 0:
        idle = duration(spent.idle_s)
        yield Text(f"    in addition, nothing ran for {idle} between starts", "dim")


def _comparison_output(records: Sequence[RunRecord]) -> dict[str, object]:
    """Output of `--json` for several runs: every one next to the first."""
    first, *others = records
    return {
        "runs": [*map(_machine_output, records)],
        "settings": {
            key: [value if is_stated(value) else None for value in values]
            for key, values in settings_that_differ(records).items()
        },
        "compared_with_first": [asdict(difference(first, other)) for other in others],
    }


def _comparison_lines(records: Sequence[RunRecord]) -> Iterator[str | Text]:
    """The runs in a table, settings that differ, and where losses differ."""
    names = [str(record.run.path) for record in records]
    rows = [["", *names], ["state", *(record.summary.ending.state for record in records)]]
    rows.append(["steps", *(f"{record.summary.steps:,}" for record in records)])
    speeds = [median_speed(record.metrics) for record in records]
    first, *others = records
    found = [difference(first, other) for other in others]
    changes = ["", *("" if one.speed is None else f" ({one.speed - 1:+.1%})" for one in found)]
    cells = ("-" if one is None else f"{one:,.0f}" for one in speeds)
    rows.append(["tokens/s", *map("".join, zip(cells, changes, strict=True))])
    yield from columns(rows)
    yield Text("\nsettings that differ", "bold")
    yield from _settings_lines(records)
    yield Text(f"\nloss, next to {names[0]}", "bold")
    for name, one in zip(names[1:], found, strict=True):
        yield f"{name}: {one.losses()}"
    for record in records:
        if record.summary.ending.state == "failed":
            yield f"{record.run.path} failed: {record.summary.ending.why}"


def _settings_lines(records: Sequence[RunRecord]) -> Iterator[str]:
    """Values of settings that all runs have, if a terminal has room. Names of the others."""
    settings = settings_that_differ(records)
    common = {key: values for key, values in settings.items() if all(map(is_stated, values))}
    if common:
        room = (Console().width - max(map(len, common))) // len(records) - 2
        rows = [
            [key, *(shortened(shown(value), max(room, 8)) for value in values)]
            for key, values in common.items()
        ]
        yield from columns([["", *names_of(records)], *rows], left=len(rows[0]))
    if others := [key for key in settings if key not in common]:
        yield f"not in all runs: {', '.join(others)}"
    if not settings:
        yield "none"
