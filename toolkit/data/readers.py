"""Rows of one data file, each with its place: the file's ending says how it is read.

JSON lines or one list of rows, Parquet, Arrow, and text, a row a line. JSON and text also
compressed. These are read line by line, up to a limit: a small compressed file may hold a line
that does not fit into memory. A list is read whole, also up to a limit.
"""

import bz2
import gzip
import json
import lzma
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from toolkit.data.columns import CORRECT, Broken, add_examples, check_column
from toolkit.data.remote import DataFile
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, RowsSource
from toolkit.text.units import MIB

ENDINGS = (".json", ".jsonl", ".parquet", ".arrow", ".txt")
ROWS_AT_ONCE = 1000
"""Rows that are Python objects at the same time: they take several times Arrow's memory."""
LONGEST_ROW_MIB = 128
"""The longest line. A longer one is an error, and is not held in memory."""
LARGEST_LIST_MIB = 1024
"""The largest JSON list, which takes several times as much memory."""
_LOOKED_AT = 10_000
"""Rows of a JSON file whose columns are looked at."""
_LIST_LOOKED_AT_MIB = 128
"""The largest list that is read for its columns: about a second."""
_WHOLE = "check that the file is whole and UTF-8"

_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Exceptions of reading files, also compressed ones."""


def _plain(stream: Any, _mode: str) -> BufferedReader:
    return BufferedReader(stream)


def _zstandard(stream: Any, _mode: str) -> BufferedReader:
    from pyarrow import CompressedInputStream

    return BufferedReader(CompressedInputStream(stream, "zstd"))


_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstandard,
}  # fmt: skip
"""How to open a compressed file, by its ending."""


def ending_of(file: DataFile) -> str:
    """The ending by which a file is read, without that of a compression. Empty if none is
    known."""
    path = PurePosixPath(str(file))
    plain = path.with_suffix("") if path.suffix in _OPENERS else path
    return plain.suffix if plain.suffix in ENDINGS else ""


def read_rows(file: DataFile, source: RowsSource) -> Iterator[tuple[str, object]]:
    """The rows of a file: dicts of columns, or whatever else a line of JSON holds. `Broken` for
    what cannot be read. Of documents, Parquet and Arrow give the column of the text alone.

    Raises DataError when the file cannot be read, for a row above `LONGEST_ROW_MIB`, and where
    a file of documents has no column of text.
    """
    match ending_of(file):
        case ".parquet" | ".arrow":
            yield from _rows_of_table(file, source)
        case ".txt":
            yield from _rows_of_text(file, source)
        case _:
            yield from _rows_of_json(file, LARGEST_LIST_MIB)


def columns_of(file: DataFile) -> tuple[dict[str, object], bool]:
    """Columns of a file, with examples as in `check_column`, and whether no row has others.
    Empty if it cannot be read. Only the first rows are read."""
    columns: dict[str, object] = {}
    # What builds the data says what is wrong with a file. A column that it does not read may
    # hold what Python has no value for: a far date, an unknown time zone.
    with suppress(Exception):
        match ending_of(file):
            case ".parquet" | ".arrow":
                with _opened_table(file) as (schema, batches):
                    columns = dict.fromkeys(schema.names)
                    for _, values in islice(rows_of(batches(None), file), ROWS_AT_ONCE):
                        add_examples(columns, values)
                return columns, True
            case ".txt":
                return {"text": ""}, True
            case ".json" | ".jsonl":
                rows = _rows_of_json(file, _LIST_LOOKED_AT_MIB)
                for number, (_, row) in enumerate(rows):
                    if isinstance(row, Broken) or number == _LOOKED_AT:
                        return columns, False
                    if not isinstance(row, dict):
                        return {}, False
                    add_examples(columns, row)
                return columns, True
    return columns, False


# Bytes


@contextmanager
def opened(file: DataFile) -> Iterator[Any]:
    """The bytes of a file, not compressed. Raises DataError where they cannot be read."""
    opener: Callable[..., Any] = _OPENERS.get(PurePosixPath(str(file)).suffix, _plain)
    raw: Any
    try:
        with file.open("rb") as raw, opener(raw, "rb") as stream:
            yield stream
    except _UNREADABLE as error:
        raise DataError(f"cannot read {file}: {error}", fix=_WHOLE) from error


# Lines


def _lines(file: DataFile, stream: Any) -> Iterator[tuple[str, bytes]]:
    """The lines of a file, each with its place, without line feed. The first without a byte
    order mark."""
    limit = LONGEST_ROW_MIB * MIB
    for number, line in enumerate(iter(partial(stream.readline, limit + 1), b""), start=1):
        if len(line) > limit and not line.endswith(b"\n"):
            raise DataError(
                f"{file}:{number}: the row is longer than {LONGEST_ROW_MIB:,} MiB, the limit",
                fix="correct the file, or write its rows as Parquet",
            )
        line = line.removesuffix(b"\n")
        yield f"{file}:{number}", line if number > 1 else line.removeprefix(BOM_UTF8)


def _rows_of_text(file: DataFile, source: RowsSource) -> Iterator[tuple[str, object]]:
    if isinstance(source, HfSource):
        check_column(source, {"text": ""})
    with opened(file) as stream:
        for place, line in _lines(file, stream):
            try:
                yield place, {"text": line.removesuffix(b"\r").decode()}
            except UnicodeDecodeError:
                yield place, Broken("it is not UTF-8")


# JSON


def _rows_of_json(file: DataFile, list_mib: int) -> Iterator[tuple[str, object]]:
    with opened(file) as stream:
        if _stripped(stream.peek(1)).startswith(b"["):
            yield from _rows_of_list(file, stream, list_mib)
            return
        for place, line in _lines(file, stream):
            if _stripped(line):
                yield place, _parsed(line)


def _stripped(line: bytes) -> bytes:
    return line.removeprefix(BOM_UTF8).strip()


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = f"0x{error.object[error.start]:02x}"
        return Broken(f"it is not UTF-8 (byte {byte} at {error.start + 1:,})")
    except json.JSONDecodeError as error:
        line = f"line {error.lineno:,}, " if error.lineno > 1 else ""
        return Broken(f"it is not JSON ({error.msg}, {line}character {error.colno:,})")
    except RecursionError:
        return Broken("it is nested too deeply")
    except ValueError:
        return Broken("it holds a number of thousands of digits")


def _rows_of_list(file: DataFile, stream: Any, limit_mib: int) -> Iterator[tuple[str, object]]:
    """The rows of a file that is one list, which is read whole, each with its place."""
    text = stream.read(limit_mib * MIB + 1)
    if len(text) > limit_mib * MIB:
        raise DataError(
            f"{file}: the list is larger than {limit_mib:,} MiB, the limit",
            fix="write its rows as JSON lines, or as Parquet",
        )
    rows = _parsed(text)
    if isinstance(rows, Broken):
        raise DataError(f"{file}: {rows.why}", fix=_WHOLE)
    assert isinstance(rows, list), "it begins with a bracket"
    for number, row in enumerate(rows, start=1):
        yield f"{file}, row {number:,}", row


# Parquet and Arrow


@contextmanager
def _opened_table(file: DataFile) -> Iterator[tuple[Any, Callable[[list[str] | None], Any]]]:
    """The schema of a file, and what gives record batches of the columns of these names."""
    from pyarrow import ArrowInvalid, ipc, parquet

    with file.open("rb") as stream:
        if ending_of(file) == ".parquet":
            table = parquet.ParquetFile(stream)
            yield (
                table.schema_arrow,
                lambda names: table.iter_batches(ROWS_AT_ONCE, columns=names),
            )
            return
        try:
            reader = ipc.open_stream(stream)
            batches = iter(reader)
        except ArrowInvalid:
            stream.seek(0)
            reader = ipc.open_file(stream)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        yield (
            reader.schema,
            lambda names: (batch.select(names or reader.schema.names) for batch in batches),
        )


def _rows_of_table(file: DataFile, source: RowsSource) -> Iterator[tuple[str, object]]:
    from pyarrow import ArrowException

    try:
        with _opened_table(file) as (schema, batches):
            if isinstance(source, HfSource):
                check_column(source, dict.fromkeys(schema.names))
                yield from rows_of(batches([source.text_field]), file)
            else:
                # It keeps values of several kinds as JSON: messages of chats may have them.
                from datasets import Features

                yield from rows_of(batches(None), file, Features.from_arrow_schema(schema))
    except (ArrowException, OSError, zlib.error) as error:
        raise DataError(f"cannot read {file}: {error}", fix=CORRECT) from error


def rows_of(
    batches: Iterable[Any], name: object, types: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of record batches of the file `name`, decoded by these `Features` of `datasets`
    if there are any."""
    before = 0
    slices = (
        batch.slice(start, ROWS_AT_ONCE)
        for batch in batches
        for start in range(0, len(batch), ROWS_AT_ONCE)
    )
    for batch in slices:
        try:
            rows: list[dict[str, Any]] = batch.to_pylist()
        except (ValueError, OverflowError) as error:  # no UTF-8, a date beyond Python's
            where = f"rows {before + 1:,} to {before + len(batch):,}"
            raise DataError(f"{name}, {where}: {error}", fix=CORRECT) from error
        for number, row in enumerate(rows, before + 1):
            if types is not None:
                row = without_added_nulls(types.decode_example(row), types)  # type: ignore[attr-defined]
            yield f"{name}, row {number:,}", row
        before += len(rows)


def without_added_nulls(row: dict[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The row without the null keys that Arrow adds inside its columns to make all rows
    uniform. `types` are those of its columns. Values of the type Json are as they were
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
