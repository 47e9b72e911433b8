"""Print JSON for programs, or lines for people, with rows of anything as a table."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, NamedTuple, TypeVar

import typer
from rich.rule import Rule
from rich.table import Table as RichTable
from rich.text import Text

from toolkit.cli.console import Console
from toolkit.errors import EXIT_DONE
from toolkit.run.jsonl import plain
from toolkit.text.redact import redact

Row = TypeVar("Row")

_INDENT = 6
"""Least indent of what a terminal has no room for on the first line."""


class Hanging(NamedTuple):
    """A line whose rest, on a terminal, is wrapped under the beginning of `body`."""

    prefix: Text
    body: str


Line = str | Text | Hanging | RichTable | Rule


def output(
    as_json: bool,
    data: object,
    lines: Iterable[Line],
    *,
    wrap: bool = True,
    exit_code: int = EXIT_DONE,
) -> None:
    """Print `data` as JSON on one line, values as of `run.jsonl`, or `lines` (see `show`).

    Then exit with the code, if it is not 0.
    """
    if as_json:
        typer.echo(
            json.dumps(plain(data), default=lambda one: plain(asdict(one)), allow_nan=False)
        )
    else:
        show(lines, wrap=wrap)
    if exit_code != EXIT_DONE:
        raise typer.Exit(exit_code)


def show(lines: Iterable[Line], console: Console | None = None, *, wrap: bool = True) -> None:
    """Print lines, secrets in plain ones masked. For a terminal they are wrapped with a hanging
    indent, unless it shall find `file:line`, or a line to copy, in them; in a file never."""
    console = console or Console()
    room = console.width if wrap and console.is_terminal else None
    for line in lines:
        if isinstance(line, RichTable | Rule):
            console.print(line)
        elif isinstance(line, Hanging):
            for text in _hanging(line, console):
                console.print(text, soft_wrap=True)
        else:
            text = Text(redact(line)) if isinstance(line, str) else line
            if room is not None and not text.no_wrap and text.cell_len >= room:
                indent = Text(" " * max(_INDENT, len(text.plain) - len(text.plain.lstrip())))
                first, *others = text.wrap(console, room - len(indent))
                text = Text("\n").join([first, *(indent + other for other in others)])
            console.print(text, soft_wrap=True)


def _hanging(line: Hanging, console: Console) -> Iterator[Text]:
    width = line.prefix.cell_len
    bodies = [Text(redact(line.body))]
    if console.is_terminal:
        bodies = [*bodies[0].wrap(console, max(console.width - width, 20))]
    for index, body in enumerate(bodies):
        body.rstrip()
        yield Text.assemble(" " * width if index else line.prefix, body)


def columns(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> list[str]:
    """Rows in columns as wide as they must be, the first `left` to the left, others right."""
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
    """The columns of a table, and what each says of a row."""

    columns: Mapping[str, Callable[[Row], str]]
    left: int = 1
    """Columns that are aligned on the left, the first ones."""
    gap: str = "  "

    def lines(
        self, rows: Sequence[Row], style: Callable[[Row], str] = lambda _: "", indent: str = ""
    ) -> Iterator[Text]:
        """A dim header, and each row in its style, in columns as wide as they must be."""
        cells = ([text(row) for text in self.columns.values()] for row in rows)
        styles = ["dim", *map(style, rows)]
        lines = columns([[*self.columns], *cells], self.left, self.gap)
        for line, colour in zip(lines, styles, strict=True):
            yield Text(indent + line, colour)
