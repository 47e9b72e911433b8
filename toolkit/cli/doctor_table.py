"""The tables of `dmt doctor`."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.text import Text

from toolkit.cli.output import Hanging, Line
from toolkit.doctor.finding import LEVELS, Finding, Level

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
