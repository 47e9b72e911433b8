"""`dmt report`: what a run did and where its time went, from its run directory alone."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from toolkit.cli.bars import BAR_WIDTH
from toolkit.cli.comparison import comparison_lines, comparison_output
from toolkit.cli.extras import option
from toolkit.cli.options import AsJson
from toolkit.cli.output import output
from toolkit.errors import DataError
from toolkit.report.goodput import PARTS, Goodput
from toolkit.report.record import RunRecord, find_runs, read_record
from toolkit.run.comparison import summary_numbers
from toolkit.text.terminal import tell
from toolkit.text.units import duration


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
        option("report --html")(records, html)
        tell(f"report {html}: open it in a browser, it needs nothing else")
    elif len(records) > 1:
        data = comparison_output(records) if as_json else None
        output(as_json, data, comparison_lines(records))
    else:
        output(as_json, machine_output(records[0]), _lines(records[0]))


def machine_output(record: RunRecord) -> dict[str, Any]:
    """Output of `--json`."""
    summary, spent = record.summary, record.spent
    fields = asdict(summary)
    first, last = summary.losses or (None, None)
    prediction = summary.prediction
    return fields | {
        "run": str(record.run.path),
        "state": summary.ending.state,
        "missing": record.missing,
        "pace": record.pace,
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
    yield from (Text(f"warning: {what}", "yellow") for what in record.missing)


def _time_lines(spent: Goodput) -> Iterator[Text]:
    """Goodput, then a line for each part with a bar."""
    if spent.share is None:
        yield Text("  goodput: nothing to divide yet, the run has just begun")
        return
    shares, total = spent.percentages(), duration(spent.total_s)
    yield Text.assemble(("  goodput", "dim"), f"  {shares['productive']:.1f}% of {total}")
    for name, label in PARTS.items():
        bar = "█" * round(shares[name] / 100 * BAR_WIDTH)
        row = f"    {label:<22}{duration(spent.parts_s[name]):>12}  {shares[name]:>5.1f}%"
        yield Text.assemble(row, (f"  {bar}" if bar else "", "cyan"))
    if spent.idle_s > 0:
        idle = duration(spent.idle_s)
        yield Text(f"    in addition, nothing ran for {idle} between starts", "dim")
