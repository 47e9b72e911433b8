"""Parquet files: a row group belongs to the range that holds its middle."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from toolkit.data.formats.arrow import (
    ROWS_AT_ONCE,
    checked_columns,
    readable,
    rows_of,
    types_of,
)
from toolkit.data.formats.base import Format
from toolkit.data.formats.columns import arrow_kinds
from toolkit.data.formats.files import FileRange, ListedFile
from toolkit.recipe.schema import RowsSource


class Parquet(Format):
    """A row of a row group."""

    endings = (".parquet",)
    cut = (".parquet",)
    in_folders = True

    def columns(self, files: Sequence[ListedFile]) -> tuple[dict[str, str], bool]:
        columns: dict[str, str] = {}
        for file in files:
            columns |= arrow_kinds(_footer(file).schema.to_arrow_schema())
        return columns, True

    def rows(self, source: RowsSource, part: FileRange) -> Iterator[tuple[object, object]]:
        from pyarrow import parquet

        with readable(part.file):
            footer = _footer(part.file)
            schema = footer.schema.to_arrow_schema()
            names = checked_columns(source, schema)
            groups, before = [], 0
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                if part.start <= _middle(group) < part.stop:
                    groups.append(number)
                elif not groups:
                    before += group.num_rows
            if not groups:
                return
            with part.file.open() as stream:
                opened = parquet.ParquetFile(stream, metadata=footer)
                batches = opened.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=names)
                yield from rows_of(batches, part.file, before, types_of(source, schema))


@lru_cache(maxsize=8)
def _footer(file: ListedFile) -> Any:
    """What all ranges of a file need."""
    from pyarrow import parquet

    with file.open() as stream:
        return parquet.read_metadata(stream)


def _middle(group: Any) -> int:
    """The byte of a file at which half of a row group lies before."""
    columns = [group.column(number) for number in range(group.num_columns)]
    starts = (
        offset
        for one in columns
        for offset in (one.dictionary_page_offset, one.data_page_offset)
        if offset is not None
    )
    size = sum(one.total_compressed_size for one in columns)
    return int(min(starts, default=0) + size // 2)


PARQUET = Parquet()
