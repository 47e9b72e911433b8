"""The tables of `dmt doctor`."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from toolkit.cli.bars import columns, print_hanging
from toolkit.cli.console import Console
from toolkit.doctor.finding import LEVELS, Finding, Level
from toolkit.redact import redact
from toolkit.units import seconds

if TYPE_CHECKING:
    from toolkit.doctor.bandwidth import Bandwidth

_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("·", "dim"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "red"),
}


_NAME_WIDTH = 18
"""Characters of the longest name; a longer one moves its own line only."""


def show(findings: Iterable[Finding], console: Console) -> list[Finding]:
    """Print each finding as it comes, by group, and return all of them.

    Under one that is not ok: what needs it, and its fix.
    """
    shown: list[Finding] = []
    for group, members in groupby(findings, key=lambda finding: finding.group):
        console.print(Text(group, "bold"))
        for finding in members:
            shown.append(finding)
            mark, colour = _MARKS[finding.level]
            prefix = Text.assemble("  ", (mark, colour), f" {finding.name:<{_NAME_WIDTH}}  ")
            print_hanging(console, prefix, redact(finding.found))
            indent = Text(" " * (_NAME_WIDTH + 6))
            if finding.needed_by and finding.level != "ok":
                print_hanging(console, indent, f"needed by {redact(finding.needed_by)}")
            if finding.fix:
                print_hanging(console, indent, f"fix: {redact(finding.fix)}")
    console.print(_total(shown))
    return shown


def _total(findings: Sequence[Finding]) -> str:
    """`2 problems (1 that the recipe needs), 1 warning, 4 notes`."""
    blocking = sum(finding.blocks for finding in findings)
    parts = []
    for level in reversed(LEVELS[1:]):
        count = sum(finding.level == level for finding in findings)
        text = f"{count} {level}{'s' * (count != 1)}"
        if level == "problem" and count:
            text += f" ({blocking or 'none'} in the way of the recipe)"
        parts.append(text)
    return ", ".join(parts)


def rates(found: "Bandwidth") -> list[str]:
    """A line per operation and size, and what the columns mean."""
    rows = [["operation", "MiB", "time", "algorithm GB/s", "bus GB/s", "peak GB/s", "share"]]
    for rate in found.rates:
        peak = rate.peak_bytes_per_s
        rows.append(
            [
                rate.operation,
                f"{rate.message_bytes / 2**20:.4g}",
                seconds(rate.seconds),
                f"{rate.algorithm_bytes_per_s / 1e9:.3g}",
                f"{rate.bus_bytes_per_s / 1e9:.3g}",
                "-" if peak is None else f"{peak / 1e9:.3g}",
                "-" if peak is None else f"{rate.bus_bytes_per_s / peak:.0%}",
            ]
        )
    where = f"{found.world} ranks on {found.nodes} machine{'s' * (found.nodes > 1)}"
    nominal = " (nominal: a processor has no data sheet)" if found.gpu == "cpu" else ""
    note = f"{where}, {found.gpu}; peak of the slowest link each way{nominal}"
    return [*columns(rows), note]
