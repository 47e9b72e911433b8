"""Print for people, where external text is shown, never interpreted, and JSON for programs."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import typer
from rich import console
from rich.segment import Segment
from rich.text import Text

from toolkit.errors import EXIT_DONE, Problem
from toolkit.run.jsonl import plain
from toolkit.text.redact import redact
from toolkit.text.terminal import printable

Row = TypeVar("Row")
Line = str | Text

_INDENT = 6
"""The least indent of continued lines on a terminal."""


class Console(console.Console):
    """No markup, no highlighting, and control characters as escapes (`printable`)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Escape control characters before rich drops some of them from the text."""
        return super().render_str(printable(text, lines=True), **settings)

    def render(self, *args: Any, **settings: Any) -> Iterator[Segment]:
        """Escape control characters in every text. rich's own control codes stay."""
        for segment in super().render(*args, **settings):
            text, style, control = segment
            yield segment if control else Segment(printable(text, lines=True), style)


def problem_list(title: str, problems: Sequence[Problem]) -> Text:
    """Mistakes in a recipe, a block each: where, what was found, what is allowed, the fix.

    Lines are not wrapped, so that a terminal finds `file:line`.
    """
    count = len(problems)
    text = Text.assemble(("✗ ", "red"), (printable(title), "bold"))
    text.append(f"  {count} problem{'s' * (count > 1)}", "red")
    for problem in problems:
        where = f"{problem.file}:{problem.line}" if problem.line else problem.file
        text.append(f"\n  {where}{'  ' * bool(where)}", "cyan")
        text.append(problem.key, "bold")
        text.append(f"\n      found    {problem.found}")
        text.append(f"\n      allowed  {problem.allowed}")
        if problem.fix:
            text.append("\n      fix      ")
            text.append(problem.fix, "green")
    return text


def output(
    as_json: bool,
    data: object,
    lines: Iterable[Line],
    *,
    wrap: bool = True,
    exit_code: int = EXIT_DONE,
) -> None:
    """Print `data` as one line of JSON if `as_json`, else print `lines`. Then exit with
    `exit_code` unless it is 0."""
    if as_json:
        typer.echo(
            json.dumps(plain(data), default=lambda one: plain(asdict(one)), allow_nan=False)
        )
    else:
        show(lines, wrap=wrap)
    if exit_code != EXIT_DONE:
        raise typer.Exit(exit_code)


def show(lines: Iterable[Line], *, wrap: bool = True) -> None:
    """Print lines, secrets masked. On a terminal, long lines are wrapped with a hanging indent
    if `wrap`. Pass False for lines to copy, or where the terminal shall find `file:line`. Lines
    in a file are never wrapped."""
    console = Console()
    room = console.width if wrap and console.is_terminal else None
    for line in lines:
        text = line if isinstance(line, Text) else Text(line)
        if (masked := redact(text.plain)) != text.plain:
            text = Text(masked)
        if room is not None and text.cell_len >= room:
            text = _hanging(text, console)
        console.print(text, soft_wrap=True)


def _hanging(text: Text, console: Console) -> Text:
    """Wrap a line to the terminal's width. Continued lines begin below the last column or label
    in its first half. Two spaces end a column or label."""
    label = "".join(text.plain[: console.width // 2].rpartition("  ")[:2])
    head, body = text.divide([len(label)])
    indent = max(len(label), _INDENT)
    first, *others = body.wrap(console, console.width - indent)
    lines = [head + first, *(Text(" " * indent) + other for other in others)]
    for one in lines:
        one.rstrip()
    return Text("\n").join(lines)


def columns(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> list[str]:
    """Rows as lines, in columns as wide as needed. The first `left` columns are aligned on the
    left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


@dataclass(frozen=True)
class Table(Generic[Row]):
    """The columns of a table: a title and a function that gives each row's cell."""

    columns: Mapping[str, Callable[[Row], str]]
    left: int = 1
    """How many of the first columns are aligned on the left."""
    gap: str = "  "
    remark: Callable[[Row], str] = lambda _: ""
    """Text behind the columns of a row."""

    def lines(
        self, rows: Sequence[Row], style: Callable[[Row], str] = lambda _: "", indent: str = ""
    ) -> Iterator[Text]:
        """A dim header, and each row in its style, in columns as wide as they must be."""
        cells = ([text(row) for text in self.columns.values()] for row in rows)
        styles = ["dim", *map(style, rows)]
        remarks = ["", *map(self.remark, rows)]
        lines = columns([[*self.columns], *cells], self.left, self.gap)
        for line, remark, colour in zip(lines, remarks, styles, strict=True):
            yield Text(f"{indent}{line}{'  ' * bool(remark)}{remark}", colour)
