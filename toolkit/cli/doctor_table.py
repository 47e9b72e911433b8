"""The lines of `dmt doctor`."""

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
_NAME_WIDTH = 13
"""Characters of the longest group; a longer name moves its own line only."""


def lines(findings: Iterable[Finding], shown: list[Finding]) -> Iterator[Line]:
    """A line for what is fine of each group, as it comes, and each other finding with what it
    costs, what needs it and its fix; then how many there were. They are added to `shown`."""
    for group, members in groupby(findings, key=lambda finding: finding.group):
        fine: list[Finding] = []
        others: list[Finding] = []
        for finding in members:
            (fine if finding.level == "ok" else others).append(finding)
        shown += [*fine, *others]
        if fine:
            text = ", ".join(f"{one.name} {one.found}" for one in fine)
            yield Hanging(_head("ok", group), text)
        for finding in others:
            yield Hanging(_head(finding.level, finding.name), finding.found)
            about = {"costs": finding.cost, "needed by": finding.needed_by, "fix": finding.fix}
            for word, value in about.items():
                if value:
                    yield Hanging(Text(" " * 4), f"{word}: {value}")
    yield _total(shown)


def _head(level: Level, name: str) -> Text:
    mark, colour = _MARKS[level]
    return Text.assemble((mark, colour), f" {name:<{_NAME_WIDTH}}  ")


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
