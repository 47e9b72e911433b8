"""`dmt compare`: differences between runs in settings, loss and speed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from toolkit.cli.options import AsJson
from toolkit.cli.output import columns, output
from toolkit.errors import DataError
from toolkit.report.compare import (
    difference,
    median_speed,
    names_of,
    settings_that_differ,
    verdict,
    where_losses_differ,
    why_speeds_differ,
)
from toolkit.report.record import RunRecord, read_record
from toolkit.run import jsonl
from toolkit.run.changes import is_stated, shown
from toolkit.text.units import shortened

_LONGEST = 24
"""Letters of a setting's value on the terminal."""


def compare(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN…", help="Run directories.")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare runs with the first one: settings, first step whose loss differs, speed and loss.

    Example: `dmt compare runs/before runs/after`
    """
    if len(run_dirs) < 2:
        raise DataError("one run has nothing to be compared with", fix="name another one")
    records = [read_record(path) for path in run_dirs]
    data = jsonl.plain(_machine_output(records)) if as_json else None
    output(as_json, data, _lines(records))


def _machine_output(records: Sequence[RunRecord]) -> dict[str, object]:
    settings = settings_that_differ(records)
    first, *others = records
    return {
        "runs": [str(record.run.path) for record in records],
        "states": [record.state[0] for record in records],
        "steps": [record.summary.steps for record in records],
        "tokens_per_s": [median_speed(record.metrics) for record in records],
        "settings": {
            key: [value if is_stated(value) else None for value in values]
            for key, values in settings.items()
        },
        "compared_with_first": [asdict(difference(first, other)) for other in others],
        "missing": {str(record.run.path): record.missing for record in records},
    }


def _lines(records: Sequence[RunRecord]) -> Iterator[str | Text]:
    names = [str(record.run.path) for record in records]
    rows = [["", *names], ["state", *(record.state[0] for record in records)]]
    rows.append(["steps", *(f"{record.summary.steps:,}" for record in records)])
    speeds = [median_speed(record.metrics) for record in records]
    rows.append(["tokens/s", *("-" if one is None else f"{one:,.0f}" for one in speeds)])
    yield from columns(rows)
    yield Text("\nsettings that differ", "bold")
    settings = settings_that_differ(records)
    table = [
        ["", *names_of(records)],
        *([key, *map(_short, values)] for key, values in settings.items()),
    ]
    yield from columns(table, left=len(table[0])) if settings else ["none"]
    first, *others = records
    found = [difference(first, other) for other in others]
    yield Text("\nloss", "bold")
    for name, one in zip(names[1:], found, strict=True):
        yield f"{name}: {where_losses_differ(one)}"
    yield Text("\nverdict", "bold")
    for name, one, other in zip(names[1:], found, others, strict=True):
        yield verdict(name, names[0], one)
        yield from (f"  - {reason}" for reason in why_speeds_differ(first, other))
    for record in records:
        state, why = record.state
        if state == "failed":
            yield f"{record.run.path} failed: {why}"
    for record in records:
        yield from (f"warning: {record.run.path}: {what}" for what in record.missing)


def _short(value: object) -> str:
    return shortened(shown(value), _LONGEST)
