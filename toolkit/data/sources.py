"""Sources of documents: text files, and rows of every format."""

import codecs
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from toolkit.data.files import content_fingerprint, find_texts, fingerprint_of
from toolkit.data.formats.base import format_of, texts_of_rows
from toolkit.data.formats.columns import CORRECT, check_column
from toolkit.data.formats.files import ListedFile
from toolkit.data.formats.lines import LINES
from toolkit.data.progress import Track, untracked
from toolkit.data.records import Records, open_records
from toolkit.data.remote.copies import with_copies
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, TextSource

logger = logging.getLogger(__name__)


def open_source(
    source: TextSource | HfSource, *, base: Path, cache: Path, track: Track = untracked
) -> "Documents":
    """Find the documents of `source`; relative paths start at `base`.

    `cache` is the folder that remembers the hashes of files, and holds copies of remote ones.
    Raises DataError when there are none, BackendUnavailable when `datasets` is missing.
    """
    if isinstance(source, HfSource):
        return _open_rows(open_records(source, base=base, cache=cache, track=track))
    source = with_copies(source, cache, track)
    texts = find_texts(source.files, base, source.exclude)
    return TextDocuments(tuple(texts), content_fingerprint(texts, cache))


def _open_rows(records: Records) -> "RowDocuments":
    source = records.source
    assert isinstance(source, HfSource), "documents"
    if not records.files:
        parts = ["hub", source.path, source.name, source.split, source.text_field]
        return RowDocuments(source, records, fingerprint_of([*parts, records.version]))
    parts = ["hf", records.version, source.name, source.split, source.text_field]
    if source.malformed == "drop":
        parts.append(f"at most {source.malformed_limit} dropped")
    if any(format_of(file) is LINES for file in records.files):
        parts.append("lines end with a line feed, and no byte order mark is read")
    if (index := records.index) is not None:
        form, files = index
        check_column(source, form.columns(files)[0])
    return RowDocuments(source, records, fingerprint_of(parts))


@dataclass(frozen=True)
class TextDocuments:
    """One document per file. Bytes that are not UTF-8 become U+FFFD, reported once."""

    files: tuple[Path, ...]
    fingerprint: str
    """Changes with the contents; stays the same when files are only moved."""

    def __iter__(self) -> Iterator[str]:
        return map("".join, self.in_parts())

    def in_parts(self) -> Iterator[Iterable[str]]:
        """The texts, each in parts, so that a large file is never completely in memory."""
        not_utf8: list[Path] = []
        for path in self.files:
            yield decoded(ListedFile.of(path).blocks(), partial(not_utf8.append, path))
        if not_utf8:
            logger.warning(
                "not UTF-8: %d of %d files; their undecodable bytes were replaced by U+FFFD "
                "(the first is %s)",
                len(not_utf8),
                len(self.files),
                not_utf8[0],
            )


def decoded(blocks: Iterable[bytes], not_utf8: Callable[[], object]) -> Iterator[str]:
    """The text of a file, block by block; calls `not_utf8` where that is not what it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in chain(blocks, [b""]):
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError:
            not_utf8()
            decoder.errors = "replace"
            yield decoder.decode(block, final=not block)


@dataclass(frozen=True)
class RowDocuments:
    """One document per row, from the column `text_field`; the empty string where it is null."""

    source: HfSource
    records: Records
    fingerprint: str

    def __iter__(self) -> Iterator[str]:
        seen = yield from texts_of_rows(self.records, self.source)
        if not seen and self.records.index is None:
            raise DataError(f"`{self.source.path}` has no rows", fix=CORRECT)

    def in_parts(self) -> Iterator[Iterable[str]]:
        return ((text,) for text in self)


Documents: TypeAlias = TextDocuments | RowDocuments
"""The documents of a source, read one by one, always in the same order."""
