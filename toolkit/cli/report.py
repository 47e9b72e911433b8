"""`dmt report`: what a run did and where its time went, from its run directory alone."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from toolkit.cli.bars import BAR_WIDTH, show
from toolkit.cli.console import Console
from toolkit.cli.options import AsJson
from toolkit.errors import DataError
from toolkit.report.goodput import PARTS, Goodput, goodput
from toolkit.report.record import find_runs, read_record
from toolkit.report.summary import DATA_BOUND, Ending, Summary
from toolkit.run import jsonl
from toolkit.run.comparison import differences, summary_numbers
from toolkit.run.directory import RunDirectory
from toolkit.units import duration

_LABELS = {
    "productive": "productive",
    "start_up": "start-up and restarts",
    "loading": "loading checkpoints",
    "replayed": "replayed steps",
    "saving": "saving (stalls)",
    "skipped": "skipped batches",
    "evaluation": "evaluation",
    "hung": "hangs and detection",
    "not_accounted": "not accounted",
}


def report(
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="Run directory; default: the last one in runs/."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print text (the default).")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run did, where its time went and how it ended; also of one that still runs.

    Example: `dmt report runs/tiny-llama-bytes --text`
    """
    if text and as_json:
        raise DataError("--text and --json: one form at a time", fix="leave one out")
    record = read_record(run_dir or find_runs(Path("runs"))[0])
    run, summary, spent = record.run, record.summary, goodput(record.events, record.metrics)
    if as_json:
        typer.echo(json.dumps(jsonl.plain(machine_output(run, summary, spent))))
        return
    show(Console(), _lines(run, summary, spent))


def machine_output(run: RunDirectory, summary: Summary, spent: Goodput) -> dict[str, Any]:
    """What `--json` prints; a part of the time is null where the run did not record it."""
    fields = asdict(summary)
    first, last = summary.losses or (None, None)
    prediction = summary.prediction
    return fields | {
        "run": str(run.path),
        "goodput": spent.share,
        "total_s": spent.total_s,
        "idle_s": spent.idle_s,
        "time_s": dict(spent.parts_s),
        "losses": {"first": first and asdict(first), "last": last and asdict(last)},
        "prediction": None if prediction is None else summary_numbers(prediction),
    }


def _lines(run: RunDirectory, summary: Summary, spent: Goodput) -> Iterator[Text]:
    yield Text(str(run.path), "bold")
    for label, value in _rows(run, summary):
        yield Text.assemble((f"  {label:<13}", "dim"), value)
    yield Text("")
    yield from _time_lines(spent)


def _rows(run: RunDirectory, summary: Summary) -> Iterator[tuple[str, str]]:
    yield "ended", _ended(run, summary.ending)
    tokens = summary.tokens
    trained = f", {tokens:,} trained tokens up to the last logged one" if tokens else ""
    yield "steps", f"{summary.steps:,} done{trained}"
    if summary.losses is not None:
        first, last = summary.losses
        path = f"{first.value:.4f} at step {first.step:,} → {last.value:.4f} at {last.step:,}"
        yield "loss", path
    if summary.validation is not None:
        yield (
            "validation",
            f"{summary.validation.value:.4f} at step {summary.validation.step:,}",
        )
    starts = (
        f"{summary.starts:,}, {len(summary.restarts):,} of them by the launcher after a failure"
    )
    if summary.restarts_after_stop:
        starts += f", {summary.restarts_after_stop:,} although a signal had stopped the run"
    yield "starts", starts
    for reason in summary.restarts:
        yield "", f"- {reason}"
    yield "checkpoints", _checkpoints(summary)
    if (share := summary.data_wait_share) is not None and share >= DATA_BOUND:
        waited = f"{share:.0%} of the step time was spent waiting for batches"
        yield "data", f"{waited}: the run is bound by its data (is `data.cache` a local disk?)"
    event = summary.prediction
    if event is not None and {"predicted", "measured", "measured_over_predicted"} <= set(event):
        yield from differences(event)


def _ended(run: RunDirectory, ending: Ending) -> str:
    if ending.state == "finished":
        return "finished (exit code 0)"
    if ending.state == "stopped":
        why = f" by {ending.why}" if ending.why else ""
        return f"stopped{why} after saving (exit code {ending.exit_code}); can be resumed"
    if ending.state == "failed":
        return f"failed (exit code {ending.exit_code}): {ending.why}"
    changed = max(path.stat().st_mtime for path in (run.events, run.metrics) if path.exists())
    ago = duration(max(0.0, time.time() - changed))
    return f"no end recorded: still running, or killed (last written {ago} ago)"


def _checkpoints(summary: Summary) -> str:
    saves = summary.saves
    if not saves.count:
        return "none written"
    said = f"{saves.count:,} written, the last at step {saves.last_step:,}"
    if saves.stall_s is not None:
        said += f"; training stood still for {saves.stall_s:.2f} s each"
    if saves.commit_s is not None:
        said += f"; {saves.commit_s:.2f} s until committed"
    return said


def _time_lines(spent: Goodput) -> Iterator[Text]:
    """Goodput, then a line for each part with a bar."""
    if spent.share is None:
        yield Text("  goodput: nothing to divide yet, the run has just begun")
        return
    shares, total = spent.percentages(), duration(spent.total_s)
    without = ", without start-up" if spent.parts_s["start_up"] is None else ""
    found = f"  {shares['productive']:.1f}% of {total}{without}"
    yield Text.assemble(("  goodput", "dim"), found)
    for name in PARTS:
        part_s = spent.parts_s[name]
        if part_s is None:
            yield Text(f"    {_LABELS[name]:<22}{'not recorded':>12}")
            continue
        bar = "█" * round(shares[name] / 100 * BAR_WIDTH)
        row = f"    {_LABELS[name]:<22}{duration(part_s):>12}  {shares[name]:>5.1f}%"
        yield Text.assemble(row, (f"  {bar}" if bar else "", "cyan"))
    if spent.idle_s > 0:
        what = "nothing ran" if spent.parts_s["start_up"] is not None else "no step was made"
        idle = duration(spent.idle_s)
        yield Text(f"    in addition, {what} for {idle} between starts", "dim")
