"""What commands print: JSON for programs, or lines for people; rows of anything as a table."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import typer
from rich.text import Text

from toolkit.cli.bars import columns, show
from toolkit.cli.console import Console

Row = TypeVar("Row")


def output(
    as_json: bool,
    data: Callable[[], object],
    lines: Callable[[], Iterable[str | Text]],
) -> None:
    """Print `data()` as JSON on one line, dataclasses as objects, or `lines()`."""
    if as_json:
        typer.echo(json.dumps(data(), default=asdict))
    else:
        show(Console(), lines())


@dataclass(frozen=True)
class Table(Generic[Row]):
    """The columns of a table, and what each says of a row."""

    columns: Mapping[str, Callable[[Row], str]]
    left: int = 1
    """Columns that are aligned on the left, the first ones."""
    gap: str = "  "

    def cells(self, rows: Iterable[Row]) -> list[list[str]]:
        """The header and the rows."""
        return [
            [*self.columns],
            *([text(row) for text in self.columns.values()] for row in rows),
        ]

    def lines(self, rows: Iterable[Row]) -> list[str]:
        """The header and the rows, in columns as wide as they must be."""
        return columns(self.cells(rows), self.left, self.gap)

    def coloured(
        self, rows: Sequence[Row], colour: Callable[[Row], tuple[str, str]]
    ) -> Iterator[tuple[Row | None, Text]]:
        """Lines with their rows, None for the header; `colour`: a word of each row, and its
        colour."""
        header, *lines = self.lines(rows)
        yield None, Text(header, "dim")
        for row, line in zip(rows, lines, strict=True):
            word, style = colour(row)
            text = Text(line)
            text.highlight_words([word], style)
            yield row, text
