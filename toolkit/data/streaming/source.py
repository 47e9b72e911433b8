"""A source of text that is tokenised chunk by chunk."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from toolkit.data.files import fingerprint_of
from toolkit.data.formats.base import format_of, texts_of_rows
from toolkit.data.formats.files import FileRange, ListedFile, identities
from toolkit.data.formats.indexed import IndexedTokens, idx_path
from toolkit.data.sources import decoded
from toolkit.data.streaming.chunks import Chunks
from toolkit.data.tokenized import CACHE_VERSION, Encoding, cached_tokens, write_tokens
from toolkit.recipe.schema import HfSource, TextSource

logger = logging.getLogger(__name__)

PREPARED = "prepared"
"""File in the folder of chunks that `dmt data prepare` tokenised: these are kept."""
_LOCKS = 256
"""Lock files of a source; a file for every chunk would be millions."""


@dataclass(frozen=True)
class ChunkedSource:
    """A source of text as it is tokenised; may be sent to another process."""

    source: TextSource | HfSource
    files: tuple[ListedFile, ...]
    chunk_bytes: int
    encoding: Encoding
    tokenizer: str
    """Fingerprint of the tokenizer."""
    cache: Path

    @cached_property
    def chunks(self) -> Chunks:
        """The files in chunks; documents that are files are whole."""
        whole = isinstance(self.source, TextSource)
        return Chunks(self.files, self.chunk_bytes, whole=whole)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the files, how they are cut, and the tokenizer."""
        column = getattr(self.source, "text_field", None)
        parts = [CACHE_VERSION, self.tokenizer, self.encoding.parse_special, column]
        return fingerprint_of([*parts, self.chunk_bytes, identities(self.files)])

    @cached_property
    def folder(self) -> Path:
        return self.cache / "tokens" / "chunks" / self.fingerprint

    @property
    def is_bounded(self) -> bool:
        """Whether it has tokens in the cache that may be removed."""
        return self.folder.is_dir() and not (self.folder / PREPARED).exists()

    def prefix(self, chunk: int) -> Path:
        """Path of a chunk's tokens, a pair of files in Megatron's indexed format."""
        return self.folder / f"{chunk:08d}"

    def lock(self, chunk: int) -> Path:
        """The lock under which the files of a chunk are written."""
        return self.folder / f"{chunk % _LOCKS}.lock"

    def tokens(self, chunk: int) -> IndexedTokens:
        """The tokens of a chunk: from the cache, or tokenised now, by this or another
        process."""
        prefix = self.prefix(chunk)
        return cached_tokens(prefix, lambda: self._write(chunk), lock=self.lock(chunk))

    def tokenise_ahead(self, chunk: int) -> bool:
        """Tokenise a chunk, unless it is in the cache or another process does it; returns
        whether this one did."""
        from filelock import FileLock, Timeout

        if idx_path(self.prefix(chunk)).exists():
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout), FileLock(self.lock(chunk)).acquire(timeout=0):
            if not idx_path(self.prefix(chunk)).exists():
                self._write(chunk)
                return True
        return False

    def _write(self, chunk: int) -> None:
        documents = (
            document for part in self.chunks[chunk] for document in texts(self.source, part)
        )
        write_tokens(self.prefix(chunk), documents, self.encoding, empty=True)


def texts(source: TextSource | HfSource, part: FileRange) -> Iterator[Iterable[str]]:
    """The documents of a range, each in parts; a row without text is the empty string.

    Raises DataError for a row that cannot be used, and when the file is no longer the one that
    was listed.
    """
    file = part.file
    file.check_unchanged()
    if isinstance(source, TextSource):
        said = "%s is not UTF-8; undecodable bytes were replaced by U+FFFD"
        yield decoded(file.blocks(), partial(logger.warning, said, file))
    else:
        form = format_of(file)
        assert form is not None, "listed files are of one known format"
        yield from ((text,) for text in texts_of_rows(form.rows(source, part), source))
    file.check_unchanged()
