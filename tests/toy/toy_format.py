"""A complete data format of another package: rows of CSV files."""

import csv
from collections.abc import Iterator, Sequence
from io import TextIOWrapper

from toolkit.data.formats.base import Format
from toolkit.data.formats.columns import TEXT
from toolkit.data.formats.compressed import opened
from toolkit.data.formats.files import FileRange, ListedFile
from toolkit.recipe.schema import RowsSource


class Csv(Format):
    """Rows below a line of column names; a file is read whole."""

    title = "CSV files"
    endings = (".csv",)

    def columns(self, files: Sequence[ListedFile]) -> tuple[dict[str, str], bool]:
        names: list[str] = []
        for file in files:
            with opened(file) as stream:
                names += next(csv.reader(TextIOWrapper(stream, "utf-8")))
        return dict.fromkeys(names, TEXT), True

    def rows(self, source: RowsSource, part: FileRange) -> Iterator[tuple[object, object]]:
        del source
        with opened(part.file) as stream:
            rows = csv.DictReader(TextIOWrapper(stream, "utf-8"))
            for row in rows:
                yield f"{part.file}:{rows.line_num}", row


CSV = Csv()
