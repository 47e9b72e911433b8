"""`dmt report`: what a run did and where its time went, from its run directory alone."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from toolkit.cli.bars import BAR_WIDTH
from toolkit.cli.extras import option
from toolkit.cli.options import AsJson
from toolkit.cli.output import output
from toolkit.errors import DataError
from toolkit.report.goodput import PARTS, Goodput
from toolkit.report.record import RunRecord, find_runs, read_record
from toolkit.run import jsonl
from toolkit.run.comparison import summary_numbers
from toolkit.text.terminal import tell
from toolkit.text.units import duration


def report(
    run_dirs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN…]",
            help="Run directories, several with --html; default: the last in runs/.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with curves instead.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print text (the default).")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run did, where its time went and how it ended; also of one that still runs.

    Example: `dmt report runs/tiny-llama-bytes --html report.html`
    """
    if text + as_json + (html is not None) > 1:
        raise DataError("--text, --json and --html: one form at a time", fix="leave one out")
    records = [read_record(path) for path in run_dirs or find_runs(Path("runs"))[:1]]
    if html is not None:
        option("report --html")(records, html)
        tell(f"report {html}: open it in a browser, it needs nothing else")
        return
    if len(records) > 1:
        raise DataError(
            f"{len(records)} runs: the text is of one", fix="add --html FILE, or `dmt compare`"
        )
    (record,) = records
    output(as_json, jsonl.plain(machine_output(record)), _lines(record))


def machine_output(record: RunRecord) -> dict[str, Any]:
    """What `--json` prints; a part of the time is null where the run did not record it."""
    summary, spent = record.summary, record.spent
    fields = asdict(summary)
    state, _ = record.state
    first, last = summary.losses or (None, None)
    prediction = summary.prediction
    return fields | {
        "run": str(record.run.path),
        "state": state,
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
    yield from _time_lines(record.spent, record.summary.steps)
    yield from (Text(f"warning: {what}", "yellow") for what in record.missing)


def _time_lines(spent: Goodput, steps: int) -> Iterator[Text]:
    """Goodput, then a line for each part with a bar."""
    if spent.share is None:
        begun = "nothing to divide yet, the run has just begun"
        yield Text(f"  goodput: {'unknown, no time of steps is recorded' if steps else begun}")
        return
    shares, total = spent.percentages(), duration(spent.total_s)
    without = ", without start-up" if spent.parts_s["start_up"] is None else ""
    found = f"  {shares['productive']:.1f}% of {total}{without}"
    yield Text.assemble(("  goodput", "dim"), found)
    for name, label in PARTS.items():
        part_s = spent.parts_s[name]
        if part_s is None:
            yield Text(f"    {label:<22}{'not recorded':>12}")
            continue
        bar = "█" * round(shares[name] / 100 * BAR_WIDTH)
        row = f"    {label:<22}{duration(part_s):>12}  {shares[name]:>5.1f}%"
        yield Text.assemble(row, (f"  {bar}" if bar else "", "cyan"))
    if spent.idle_s > 0:
        what = "nothing ran" if spent.parts_s["start_up"] is not None else "no step was made"
        idle = duration(spent.idle_s)
        yield Text(f"    in addition, {what} for {idle} between starts", "dim")
