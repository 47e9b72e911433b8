"""`dmt report A B`: differences between runs in settings, loss and speed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.text import Text

from toolkit.cli.output import columns
from toolkit.report.compare import (
    difference,
    median_speed,
    names_of,
    settings_that_differ,
)
from toolkit.report.record import RunRecord
from toolkit.run.changes import is_stated, shown
from toolkit.text.units import shortened

_LONGEST = 24
"""Characters of a setting's value on the terminal."""


def comparison_output(records: Sequence[RunRecord]) -> dict[str, object]:
    """Output of `--json`: every run next to the first one."""
    settings = settings_that_differ(records)
    first, *others = records
    return {
        "runs": [str(record.run.path) for record in records],
        "states": [record.summary.ending.state for record in records],
        "steps": [record.summary.steps for record in records],
        "tokens_per_s": [median_speed(record.metrics) for record in records],
        "settings": {
            key: [value if is_stated(value) else None for value in values]
            for key, values in settings.items()
        },
        "compared_with_first": [asdict(difference(first, other)) for other in others],
        "missing": {str(record.run.path): record.missing for record in records},
    }


def comparison_lines(records: Sequence[RunRecord]) -> Iterator[str | Text]:
    """The runs in a table, settings that differ, where losses differ, and a verdict."""
    names = [str(record.run.path) for record in records]
    rows = [["", *names], ["state", *(record.summary.ending.state for record in records)]]
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
        yield f"{name}: {one.losses()}"
    yield Text("\nverdict", "bold")
    for name, one in zip(names[1:], found, strict=True):
        yield f"{name}, next to {names[0]}: {one.verdict()}"
    for record in records:
        if record.summary.ending.state == "failed":
            yield f"{record.run.path} failed: {record.summary.ending.why}"
    for record in records:
        yield from (f"warning: {record.run.path}: {what}" for what in record.missing)


def _short(value: object) -> str:
    return shortened(shown(value), _LONGEST)
