"""The tables of `dmt doctor`."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from toolkit.cli.output import Hanging, Line, Table
from toolkit.doctor.finding import LEVELS, Finding, Level
from toolkit.text.units import seconds

if TYPE_CHECKING:
    from toolkit.doctor.bandwidth import Bandwidth, Rate

_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("·", "dim"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "red"),
}


_NAME_WIDTH = 18
"""Characters of the longest name; a longer one moves its own line only."""


def lines(findings: Iterable[Finding], shown: list[Finding]) -> Iterator[Line]:
    """Each finding as it comes, by group, and how many there were; they are added to `shown`.

    Under one that is not ok: what needs it, and its fix.
    """
    for group, members in groupby(findings, key=lambda finding: finding.group):
        yield Text(group, "bold")
        for finding in members:
            shown.append(finding)
            mark, colour = _MARKS[finding.level]
            prefix = Text.assemble("  ", (mark, colour), f" {finding.name:<{_NAME_WIDTH}}  ")
            yield Hanging(prefix, finding.found)
            indent = Text(" " * (_NAME_WIDTH + 6))
            if finding.needed_by and finding.level != "ok":
                yield Hanging(indent, f"needed by {finding.needed_by}")
            if finding.fix:
                yield Hanging(indent, f"fix: {finding.fix}")
    yield _total(shown)


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
    where = f"{found.world} ranks on {found.nodes} machine{'s' * (found.nodes > 1)}"
    nominal = " (nominal: a processor has no data sheet)" if found.gpu == "cpu" else ""
    note = f"{where}, {found.gpu}; peak of the slowest link each way{nominal}"
    return [*_RATES.lines(found.rates), note]


def _of_peak(rate: "Rate") -> str:
    peak = rate.peak_bytes_per_s
    return "-" if peak is None else f"{rate.bus_bytes_per_s / peak:.0%}"


_RATES = Table["Rate"](
    {
        "operation": lambda rate: rate.operation,
        "MiB": lambda rate: f"{rate.message_bytes / 2**20:.4g}",
        "time": lambda rate: seconds(rate.seconds),
        "algorithm GB/s": lambda rate: f"{rate.algorithm_bytes_per_s / 1e9:.3g}",
        "bus GB/s": lambda rate: f"{rate.bus_bytes_per_s / 1e9:.3g}",
        "peak GB/s": lambda rate: (
            "-" if rate.peak_bytes_per_s is None else f"{rate.peak_bytes_per_s / 1e9:.3g}"
        ),
        "share": _of_peak,
    }
)
