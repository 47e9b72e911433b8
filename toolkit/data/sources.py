"""Sources of documents: text files, and rows with a column of text."""

import codecs
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from toolkit.data.columns import CORRECT, add_examples, check_column, wrong_text
from toolkit.data.files import fingerprint_of, unreadable
from toolkit.data.listing import check_text, content_fingerprint, find_files
from toolkit.data.readers import ending_of
from toolkit.data.records import Records, open_records
from toolkit.data.remote import DataFile
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, TextSource

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Documents:
    """The documents of a source, read one by one, always in the same order."""

    fingerprint: str
    """Changes with the contents. Stays the same when files are only moved."""
    in_parts: Callable[[], Iterator[Iterable[str]]]
    """Gives the texts, each in parts, so that a large file is never completely in memory."""

    def __iter__(self) -> Iterator[str]:
        return map("".join, self.in_parts())


def open_source(source: TextSource | HfSource, cache: Path) -> Documents:
    """Find the documents of `source`.

    `cache` is the folder that remembers the hashes of files. Raises DataError when there are
    none, BackendUnavailable when `datasets` is missing.
    """
    if isinstance(source, TextSource):
        files = find_files(source.files)
        return Documents(content_fingerprint(files, cache), partial(_texts_of_files, files))
    records = open_records(source, cache)
    if not records.files:
        parts = ["hub", source.path, source.name, source.split, source.text_field]
        parts.append(records.version)
    else:
        parts = ["hf", records.version, source.name, source.split, source.text_field]
        if any(ending_of(file) == ".txt" for file in records.files):
            parts.append("lines end with a line feed, and no byte order mark is read")
    return Documents(fingerprint_of(parts), partial(_texts_of_rows, source, records))


def _texts_of_files(files: Sequence[DataFile]) -> Iterator[Iterable[str]]:
    """One document per file. Bytes that are not UTF-8 become U+FFFD, reported once."""
    not_utf8: list[DataFile] = []
    for file in files:
        yield decoded(blocks_of(file), partial(not_utf8.append, file))
    if not_utf8:
        logger.warning(
            "not UTF-8: %d of %d files; their undecodable bytes were replaced by U+FFFD "
            "(the first is %s)",
            len(not_utf8),
            len(files),
            not_utf8[0],
        )


def blocks_of(file: DataFile) -> Iterator[bytes]:
    """The bytes of a file. Raises DataError where it is not text or cannot be read."""
    try:
        with file.open("rb") as stream:
            if block := stream.read(_BLOCK_BYTES):
                check_text(file, block)
            while block:
                yield block
                block = stream.read(_BLOCK_BYTES)
    except OSError as error:
        raise unreadable(file, error) from error


def decoded(blocks: Iterable[bytes], not_utf8: Callable[[], object]) -> Iterator[str]:
    """The text of a file, block by block. Calls `not_utf8` where that is not what it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in chain(blocks, [b""]):
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError:
            not_utf8()
            decoder.errors = "replace"
            yield decoder.decode(block, final=not block)


def _texts_of_rows(source: HfSource, records: Records) -> Iterator[Iterable[str]]:
    """One document per row, from the column `text_field`. The empty string where it is null."""
    column, columns = source.text_field, dict[str, object]()
    for place, row in records:
        if (why := wrong_text(row, column)) is not None:
            of_text = ", or name a column of text in `text_field`"
            fix = f"correct the row{of_text if isinstance(row, dict) else ''}"
            raise DataError(f"{place}: {why}", fix=fix)
        assert isinstance(row, dict), "anything else is wrong"
        if columns.get(column) is None:
            add_examples(columns, row)
        yield (row.get(column) or "",)
    if not columns:
        raise DataError(f"`{source.path}` has no rows", fix=CORRECT)
    check_column(source, columns)
