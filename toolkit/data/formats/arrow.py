"""Arrow files, of streams or of random access, as `datasets` writes them."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from toolkit.data.formats.base import Format
from toolkit.data.formats.columns import CORRECT, Broken, arrow_kinds, check_column
from toolkit.data.formats.files import FileRange, ListedFile
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, RowsSource

ROWS_AT_ONCE = 1000
"""Rows that are Python objects at the same time: they take several times Arrow's memory."""


class Arrow(Format):
    """A row of a record batch."""

    endings = (".arrow",)
    in_folders = True

    def columns(self, files: Sequence[ListedFile]) -> tuple[dict[str, str], bool]:
        columns: dict[str, str] = {}
        for file in files:
            with _opened(file) as (schema, _):
                columns |= arrow_kinds(schema)
        return columns, True

    def rows(self, source: RowsSource, part: FileRange) -> Iterator[tuple[object, object]]:
        with readable(part.file), _opened(part.file) as (schema, batches):
            names = checked_columns(source, schema) or schema.names
            selected = (batch.select(names) for batch in batches)
            yield from rows_of(selected, part.file, types=types_of(source, schema))


@contextmanager
def _opened(file: ListedFile) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema and the record batches of a file, memory-mapped if it is here."""
    from pyarrow import ArrowInvalid, ipc, memory_map

    with file.open() if file.remote else memory_map(str(file.path)) as stream:
        try:
            reader = ipc.open_stream(stream)
            batches = iter(reader)
        except ArrowInvalid:
            stream.seek(0)
            reader = ipc.open_file(stream)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        yield reader.schema, batches


@contextmanager
def readable(file: ListedFile) -> Iterator[None]:
    """Raise DataError where Arrow cannot read the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, zlib.error) as error:
        raise DataError(f"cannot read {file}: {error}", fix=CORRECT) from error


def checked_columns(source: RowsSource, schema: Any) -> list[str] | None:
    """The columns of a file with this schema that are read; None: all. Raises DataError where
    the text's is not among them."""
    if not isinstance(source, HfSource):
        return None
    check_column(source, arrow_kinds(schema))
    return [source.text_field]


def types_of(source: RowsSource, schema: Any) -> Any:
    """The `Features` of `datasets`, which keeps values of several kinds as JSON: messages of
    chats may have them. None for documents."""
    if isinstance(source, HfSource):
        return None
    from datasets import Features

    return Features.from_arrow_schema(schema)


def rows_of(
    batches: Iterable[Any], name: object, before: int = 0, types: Any = None
) -> Iterator[tuple[str, object]]:
    """The rows of record batches of the file `name`; `before` rows of it come before, and
    `types_of` its schema decodes them."""
    slices = (
        batch.slice(start, ROWS_AT_ONCE)
        for batch in batches
        for start in range(0, len(batch), ROWS_AT_ONCE)
    )
    for batch in slices:
        try:
            rows: list[object] = batch.to_pylist()
        except UnicodeDecodeError:
            rows = [_row(batch, number) for number in range(len(batch))]
        for number, row in enumerate(rows, before + 1):
            if types is not None and isinstance(row, dict):
                row = without_added_nulls(types.decode_example(row), types)
            yield f"{name}, row {number:,}", row
        before += len(rows)


def without_added_nulls(row: dict[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The row without the null keys that Arrow adds inside its columns to make all rows
    uniform. `types` are those of its columns; values of the type Json are as they were
    stated."""
    return {name: _without_added(value, types.get(name)) for name, value in row.items()}


def _without_added(value: Any, kind: Any) -> Any:
    if isinstance(value, list):
        inner = kind[0] if isinstance(kind, list) else getattr(kind, "feature", None)
        return [_without_added(item, inner) for item in value]
    if isinstance(value, dict) and isinstance(kind, dict):
        pairs = ((key, item) for key, item in value.items() if item is not None)
        return {key: _without_added(item, kind.get(key)) for key, item in pairs}
    return value


def _row(batch: Any, number: int) -> object:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[number].as_py()
        except UnicodeDecodeError:
            return Broken(f"`{name}` is not UTF-8")
    return row


ARROW = Arrow()
