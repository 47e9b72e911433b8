"""The output of `dmt check --against`."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from toolkit.cli.output import Line
from toolkit.foreign.base import NO_SETTING, SettingSource
from toolkit.foreign.compare import Report, SettingComparison

_MOST_NAMES = 30
"""Settings of the other place alone: more are only counted."""

_OUTCOMES = {"agrees": "agree", "auto": "recipe fills it", "open": "open"}
_COLOURS = {"agrees": "green", "disagrees": "red", "auto": "green", "open": "yellow"}


def record(report: Report) -> dict[str, Any]:
    """One comparison as plain data, for `--json`."""
    source = report.source
    return {
        "source": source.name,
        "kind": source.kind,
        "agrees": report.agrees,
        "settings": [*report.compared],
        "only_there": source.only_there,
        "reasons": {one.at.name: one.reason for one in source.leftovers},
        "unknown": [*source.unknown],
        "precedence": [*source.who],
    }


def lines(report: Report) -> Iterator[Line]:
    """One comparison: the table, the fixes, other settings, and precedence."""
    source, conflicts = report.source, report.conflicts
    sign = Text("✓ ", "green") if report.agrees else Text("✗ ", "red")
    count = f"{len(report.compared)} settings stated in both places, {len(conflicts)} disagree"
    yield Text.assemble("  ", sign, (source.name, "bold"), f"  {source.kind}: {count}")
    if report.compared:
        yield _table(report)
    for row in report.compared:
        if row.verdict in ("disagrees", "open"):
            yield _todo(row)
    for name in source.unknown:
        hint = f": {name.hint}" if name.hint else ""
        yield Text(f"  unknown  {name.name} ({name.place}){hint}", "red")
    if names := source.only_there:
        more = len(names) - _MOST_NAMES
        shown = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        yield Text(f"  only there ({len(names)}): {shown}", "dim")
    for reason, of_reason in _by_reason(source):
        yield Text(f"    {', '.join(of_reason)}: {reason}", "dim")
    for sentence in source.who:
        yield Text(f"  {sentence}", "dim")


def _by_reason(source: SettingSource) -> Iterator[tuple[str, list[str]]]:
    """The names of settings that are only there, by what is to be said of them, if anything."""
    reasons = dict.fromkeys(one.reason for one in source.leftovers if one.reason != NO_SETTING)
    for reason in reasons:
        yield reason, [one.at.name for one in source.leftovers if one.reason == reason]


def _table(report: Report) -> Table:
    """Disagreements first, the recipe's words and value above the other's."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("setting", "value", "precedence"):
        table.add_column(name, overflow="fold")
    rank = ("disagrees", "open", "auto", "agrees")
    for row in sorted(report.compared, key=lambda row: rank.index(row.verdict)):
        outcome = Text(_OUTCOMES.get(row.verdict, row.winner), _COLOURS[row.verdict])
        agrees = row.verdict == "agrees"
        names = Text.assemble(row.key, "  " if agrees else "\n  ", (row.name, "dim"))
        values = row.recipe if agrees else f"{row.recipe or '?'}\n{row.other}"
        table.add_row(names, values, outcome)
    return table


def _todo(row: SettingComparison) -> Text:
    """Both places, and what to do."""
    text = Text("  ")
    text.append(row.place, "cyan")
    text.append(f"  {row.key}", "bold")
    if row.verdict == "disagrees":
        text.append(f"  {row.other}, the recipe {row.recipe} ({row.origin})")
    text.append(f"\n      {'fix' if row.verdict == 'disagrees' else 'open'}  ")
    text.append(row.advice, "green" if row.verdict == "disagrees" else "yellow")
    return text
