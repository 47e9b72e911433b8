"""The texts of a range of a file: lines, JSON lines, row groups, record batches, or all."""

import logging
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from io import BytesIO
from typing import Any

from toolkit.data.dropped import DroppedRows
from toolkit.data.files import unreadable
from toolkit.data.json_rows import (
    OPENERS,
    begins_list,
    is_json,
    lines_of,
    open_plain,
    rows_of_list,
    too_long,
    undecodable,
    wrong_text,
)
from toolkit.data.mds import columns_of, texts_of
from toolkit.data.sources import (
    CORRECT,
    TEXT,
    add_kinds,
    arrow_kinds,
    builder_of,
    check_column,
    decoded,
)
from toolkit.data.streaming.chunks import FileRange, ListedFile
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, TextSource
from toolkit.units import MIB

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 2**23
_COUNTED_BYTES = 2**33
"""How far lines are counted to name that of a malformed row; behind that, its byte is named."""


def texts(source: TextSource | HfSource, part: FileRange) -> Iterator[Iterable[str]]:
    """The documents of a range, each in parts; a row without text is the empty string.

    Raises DataError for a row that cannot be used, and when the file is no longer the one that
    was listed.
    """
    file = part.file
    file.check_unchanged()
    if isinstance(source, TextSource):
        said = "%s is not UTF-8; undecodable bytes were replaced by U+FFFD"
        yield decoded(_read(part), partial(logger.warning, said, file))
    else:
        readers = {"json": _json, "text": _lines, "parquet": _parquet, "arrow": _arrow}
        dropped = DroppedRows(source)
        read = _mds if file.shard is not None else readers[str(builder_of(file.path))]
        yield from ((text or "",) for text in read(source, part, dropped))
        dropped.report()
    file.check_unchanged()


@contextmanager
def _open(file: ListedFile) -> Iterator[Any]:
    """The file's bytes, not compressed."""
    with file.open() as stream, open_plain(file.path, stream) as plain:
        yield plain


def _blocks(source: HfSource, part: FileRange) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the range, in blocks of whole ones, each with its place; of a
    list, only its beginning.

    Raises DataError for a line that is longer than the limit.
    """
    path, at, limit = part.file.path, part.start, source.row_limit_mib * MIB
    compressed = path.suffix in (*OPENERS, ".zst")
    try:
        with _open(part.file) as stream:
            if at:
                stream.seek(at - 1)
                while (piece := stream.readline(_BLOCK_BYTES)) and not piece.endswith(b"\n"):
                    at += len(piece)
                at += len(piece) - 1
            while compressed or at < part.stop:
                size = _BLOCK_BYTES if compressed else min(_BLOCK_BYTES, part.stop - at)
                block = stream.read(size)
                if not block:
                    return
                if at == 0 and is_json(path) and begins_list(block):
                    yield at, block
                    return
                if not block.endswith(b"\n"):
                    block += stream.readline(limit + 1)
                if len(block) > limit:
                    for number, line in enumerate(block.split(b"\n")):
                        if len(line) > limit:
                            place = _placed(part.file, at, number)
                            raise too_long(place, source.row_limit_mib)
                yield at, block
                at += len(block)
    except undecodable() as error:
        raise DataError(
            f"cannot read {part.file}: {error}", fix="check that the file is whole"
        ) from error


def _read(part: FileRange) -> Iterator[bytes]:
    """The bytes of a file."""
    try:
        with part.file.open() as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except OSError as error:
        raise unreadable(part.file.path, error) from error


def _placed(file: ListedFile, at: int, line: int) -> str:
    """Names line `line` (from 0) behind byte `at` of a file."""
    if at > _COUNTED_BYTES:
        return f"{file}, line {line + 1:,} behind byte {at:,}"
    return f"{file}:{_lines_before(file, at) + line + 1}"


@lru_cache(maxsize=1)
def _lines_before(file: ListedFile, at: int) -> int:
    lines, left = 0, at
    with _open(file) as stream:
        while left and (block := stream.read(min(left, _BLOCK_BYTES))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def _lines(source: HfSource, part: FileRange, dropped: DroppedRows) -> Iterator[str | None]:
    """The rows of a text file."""
    check_column(source, {"text": TEXT})
    for at, block in _blocks(source, part):
        lines = block.removeprefix(BOM_UTF8 if at == 0 else b"").split(b"\n")
        for number, line in enumerate(lines if lines[-1] else lines[:-1]):
            try:
                yield line.removesuffix(b"\r").decode()
            except UnicodeDecodeError:
                dropped.add(f"{_placed(part.file, at, number)}: it is not UTF-8")


def _json(source: HfSource, part: FileRange, dropped: DroppedRows) -> Iterator[str | None]:
    """The rows of a file of JSON lines, or of one list."""
    import pyarrow as pa
    from pyarrow import json

    column, seen = source.text_field, False
    schema = pa.schema([(column, pa.string())])
    parsing = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    for at, block in _blocks(source, part):
        if at == 0 and begins_list(block):
            with _open(part.file) as stream:
                rows = rows_of_list(part.file, stream, source.row_limit_mib)
                yield from _checked(rows, column, dropped)
            return
        if not block.strip(BOM_UTF8 + b" \t\r\n"):
            continue
        reading = json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        try:
            texts = json.read_json(BytesIO(block), reading, parsing).column(0).to_pylist()
        except (pa.ArrowInvalid, UnicodeDecodeError):
            rows = ((_placed(part.file, at, line), row) for line, row in lines_of(block))
            texts = list(_checked(rows, column, dropped))
        if not seen and not any(texts):
            _check_names(source, block)
        seen = True
        yield from texts


def _checked(
    rows: Iterable[tuple[str, object]], column: str, dropped: DroppedRows
) -> Iterator[str | None]:
    """The texts of rows with their places; what Arrow does not say is said here."""
    for place, row in rows:
        if (why := wrong_text(row, column)) is not None:
            dropped.add(f"{place}: {why}")
        else:
            assert isinstance(row, dict), "anything else is wrong"
            yield row.get(column)


def _check_names(source: HfSource, block: bytes) -> None:
    """Raise DataError when no row of the block has the column."""
    columns: dict[str, str] = {}
    for _, row in lines_of(block):
        if isinstance(row, dict):
            add_kinds(columns, row)
    check_column(source, columns)


@lru_cache(maxsize=8)
def _footer(file: ListedFile) -> Any:
    """What all ranges of a Parquet file need."""
    from pyarrow import parquet

    with file.open() as stream:
        return parquet.read_metadata(stream)


def _parquet(source: HfSource, part: FileRange, dropped: DroppedRows) -> Iterator[str | None]:
    """The rows of the row groups whose middle is in the range."""
    from pyarrow import ArrowException, parquet

    column = source.text_field
    try:
        footer = _footer(part.file)
        check_column(source, arrow_kinds(footer.schema.to_arrow_schema()))
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
            batches = opened.iter_batches(row_groups=groups, columns=[column])
            yield from _of_batches(source, part, batches, before, dropped)
    except (ArrowException, OSError, zlib.error) as error:
        raise DataError(f"cannot read {part.file}: {error}", fix=CORRECT) from error


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


def _arrow(source: HfSource, part: FileRange, dropped: DroppedRows) -> Iterator[str | None]:
    """The rows of an Arrow file."""
    from pyarrow import ArrowException, ArrowInvalid, ipc

    try:
        with part.file.open() as stream:
            try:
                reader = ipc.open_stream(stream)
                batches: Any = reader
            except ArrowInvalid:
                stream.seek(0)
                reader = ipc.open_file(stream)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            check_column(source, arrow_kinds(reader.schema))
            column = reader.schema.get_field_index(source.text_field)
            chosen = (one.select([column]) for one in batches)
            yield from _of_batches(source, part, chosen, 0, dropped)
    except (ArrowException, OSError) as error:
        raise DataError(f"cannot read {part.file}: {error}", fix=CORRECT) from error


def _mds(source: HfSource, part: FileRange, dropped: DroppedRows) -> Iterator[str | None]:
    """The rows of an MDS shard."""
    file, shard = part.file, part.file.shard
    assert shard is not None, "an MDS shard"
    check_column(source, columns_of([(file.path, shard)]))
    yield from texts_of(str(file), b"".join(_read(part)), shard, source, dropped)


def _of_batches(
    source: HfSource, part: FileRange, batches: Iterable[Any], before: int, dropped: DroppedRows
) -> Iterator[str | None]:
    """The texts of record batches of one column; `before` rows of the file come before."""
    for batch in batches:
        column = batch.column(0)
        try:
            yield from column.to_pylist()
        except UnicodeDecodeError:
            for row, text in enumerate(column, before + 1):
                try:
                    yield text.as_py()
                except UnicodeDecodeError:
                    place = f"{part.file}, row {row:,}"
                    dropped.add(f"{place}: `{source.text_field}` is not UTF-8")
        before += len(column)
