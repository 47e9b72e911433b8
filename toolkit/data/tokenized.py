"""Tokenises documents once. The result is cached by content.

A cache entry is a pair of files in Megatron's indexed format, named by the hash of the
documents, the tokenizer and the format's version. The index gets its name last, so an existing
entry is complete, even after kills. One process prepares an entry while others wait. The lock
is the operating system's and is released when its holder exits.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from toolkit.data.files import cache_not_writable, fingerprint_of, held_lock
from toolkit.data.indexed import (
    IndexedTokens,
    TokenArray,
    bin_path,
    idx_path,
    is_as_written,
    no_file,
    read_indexed,
    token_dtype,
    write_chunks,
)
from toolkit.data.listing import content_fingerprint
from toolkit.data.progress import Track, untracked
from toolkit.data.remote import copied, list_files, shown
from toolkit.data.rows import Int64Array
from toolkit.data.sources import open_source
from toolkit.data.tokenizers import (
    encoder,
    encoding,
    spells_bytes,
    tokenizer_fingerprint,
    tokens_before_text,
)
from toolkit.errors import DataError
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import DocumentSource, MegatronSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from toolkit.data.chat.report import ChatReport

logger = logging.getLogger(__name__)

CACHE_VERSION = 1
"""Increment it whenever the same documents and tokenizer would give different tokens."""
_BATCH_CHARACTERS = 2**20
"""Characters that are tokenised at once, in parallel. About 100 bytes of memory each."""
_BATCHES_AT_ONCE = 2
_PIECE_CHARACTERS = 2**18
"""Longer documents are tokenised in pieces of about this size."""
_PIECE_END = re.compile(r"(?<=[^\W_])(?=\s)")
"""Where a piece may end: behind a letter or digit, before white space. No token of a
byte-level BPE spans this place, so the pieces give the same tokens as the whole. A
SentencePiece model may see one more word start per piece."""


@dataclass(frozen=True)
class TokenizedData:
    indexed: IndexedTokens
    """In conversations, a token that is not trained is stored as the complement of its id."""
    fingerprint: str
    """Changes with the documents and with the tokenizer."""
    name: str
    """Path of the pair of files, for messages."""
    row_numbers: Int64Array | None = None
    """Row of the data set that each conversation comes from, ascending [documents]. None where
    documents are texts."""
    report: "ChatReport | None" = None
    """What became of the rows of conversations."""


def prepare(
    source: DocumentSource,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    cache: Path,
    parse_special: bool = False,
    track: Track = untracked,
) -> TokenizedData:
    """Tokens of `source`: from the cache, or tokenised now.

    `parse_special`: see `encoder`. `track` shows how long work continues. Safe to call from
    several processes at once. Each document consists of the tokenizer's prefix (such as a BOS
    token), its tokens, and the EOS token. Documents without text are skipped.

    Raises DataError when there are no documents, or the cache cannot be written.
    """
    if isinstance(source, MegatronSource):
        if is_remote(source.prefix):
            return _read_remote(source.prefix, cache, track)
        return _read_megatron(Path(source.prefix), cache)
    documents = open_source(source, cache)
    parts = [CACHE_VERSION, documents.fingerprint, tokenizer_fingerprint(tokenizer)]
    key = fingerprint_of(parts if parse_special else [*parts, "special tokens are text"])
    prefix = cache / "tokens" / key

    def tokenise() -> None:
        texts = track(documents.in_parts(), "tokenising")
        write_tokens(prefix, texts, tokenizer, parse_special=parse_special)

    return TokenizedData(cached_tokens(prefix, tokenise), key, str(prefix))


def _read_megatron(prefix: Path, cache: Path) -> TokenizedData:
    """Data that is tokenised already, which its index and samples of its tokens identify."""
    indexed = _read_some(prefix, str(prefix))
    index = content_fingerprint([idx_path(prefix)], cache)
    tokens = content_fingerprint([bin_path(prefix)], cache, sampled=True)
    fingerprint = fingerprint_of(["megatron pair", index, tokens])
    return TokenizedData(indexed, fingerprint, str(prefix))


def _read_remote(prefix: str, cache: Path, track: Track) -> TokenizedData:
    """Data that is tokenised already, in a store: copied into the cache, once. The store's
    checksums identify it."""
    name = PurePosixPath(prefix).name
    found = {PurePosixPath(file.url).name: file for file in list_files(f"{prefix}.*")}
    for ending in (".idx", ".bin"):
        if f"{name}{ending}" not in found:
            raise no_file(shown(prefix), f"{shown(prefix)}{ending}")
    pair = [found[f"{name}{ending}"] for ending in (".idx", ".bin")]
    contents = fingerprint_of([file.identity for file in pair])
    folder = cache / "remote" / contents
    copied(pair, folder, track)
    indexed = _read_some(folder / name, shown(prefix))
    return TokenizedData(indexed, fingerprint_of(["megatron", contents]), shown(prefix))


def _read_some(prefix: Path, name: str) -> IndexedTokens:
    indexed = read_indexed(prefix)
    if not len(indexed.tokens):
        raise DataError(f"{name} holds no tokens", fix="build it again")
    return indexed


def _read_entry(prefix: Path, belongs: Path | None) -> IndexedTokens | None:
    """A complete cache entry. None if it has to be created."""
    if not idx_path(prefix).exists() or (belongs is not None and not belongs.exists()):
        return None
    try:
        if is_as_written(prefix):
            return read_indexed(prefix)
        why = f"{bin_path(prefix)} has changed since it was written"
    except FileNotFoundError:  # another process makes it again
        return None
    except DataError as error:
        why = error.message
    logger.warning("the data cache is damaged and is made again: %s", why)
    return None


def cached_tokens(
    prefix: Path, write: Callable[[], None], belongs: Path | None = None
) -> IndexedTokens:
    """The cache entry `prefix`. Where there is none, `write` writes it.

    It does so under the entry's lock, unless another process has meanwhile. `belongs` is a file
    that it writes before the index, and without which the entry is not whole. Raises DataError
    when the cache cannot be written.
    """
    indexed = _read_entry(prefix, belongs)
    if indexed is not None:
        return indexed
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with held_lock(prefix.with_name(prefix.name + ".lock"), "tokenising"):
            indexed = _read_entry(prefix, belongs)
            if indexed is None:
                write()
                indexed = read_indexed(prefix)
            return indexed
    except OSError as error:
        raise cache_not_writable(prefix.parent, error) from error


def write_tokens(
    prefix: Path,
    documents: Iterator[Iterable[str]],
    tokenizer: "PreTrainedTokenizerFast",
    *,
    parse_special: bool,
) -> None:
    """Write the tokens of all documents, each in parts, to `prefix`.

    Raises DataError where they are without text.
    """
    backend = encoder(tokenizer, parse_special=parse_special)
    as_bytes, dtype = spells_bytes(backend), token_dtype(len(tokenizer))
    before_text = np.array(tokens_before_text(backend), dtype=dtype)
    eos = np.array([tokenizer.eos_token_id], dtype=dtype)

    def encode(texts: list[str]) -> list[TokenArray]:
        if as_bytes:
            coded = (np.frombuffer(text.encode(), dtype=np.uint8) for text in texts)
            return [one.astype(dtype) for one in coded]
        with encoding():
            found = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=dtype) for one in found]

    def chunks() -> Iterator[tuple[TokenArray, list[int]]]:
        n_documents, length = 0, 0
        for pieces, encoded in _encoded(_batches(_pieces(documents)), encode):
            tokens, lengths = list[TokenArray](), list[int]()
            for piece, ids in zip(pieces, encoded, strict=True):
                if piece.first:
                    tokens.append(before_text)
                    length = len(before_text)
                tokens.append(ids)
                length += len(ids)
                if piece.last:
                    tokens.append(eos)
                    lengths.append(length + 1)
            n_documents += len(lengths)
            yield np.concatenate(tokens), lengths
        if not n_documents:
            raise DataError(
                "the data has no text: every document is empty",
                fix="check the files, or the column that `text_field` names",
            )

    write_chunks(prefix, dtype, chunks())


class _Piece(NamedTuple):
    """Part of a document that is tokenised on its own."""

    text: str
    first: bool
    """Whether it opens its document."""
    last: bool
    """Whether it ends its document."""


def _encoded(
    batches: Iterator[list[_Piece]], encode: Callable[[list[str]], list[TokenArray]]
) -> Iterator[tuple[list[_Piece], list[TokenArray]]]:
    """Each batch with the tokens of its pieces, while the next ones are being encoded.

    `tokenizers` encodes a batch on all cores, but converts its tokens to Python lists on one
    core: with two batches at a time, the other cores stay busy.
    """
    ahead: deque[tuple[list[_Piece], Future[list[TokenArray]]]] = deque()
    with ThreadPoolExecutor(_BATCHES_AT_ONCE) as pool:
        for pieces in batches:
            ahead.append((pieces, pool.submit(encode, [piece.text for piece in pieces])))
            if len(ahead) > _BATCHES_AT_ONCE:
                done, tokens = ahead.popleft()
                yield done, tokens.result()
        for done, tokens in ahead:
            yield done, tokens.result()


def _pieces(documents: Iterator[Iterable[str]]) -> Iterator[_Piece]:
    """Every document with text, in pieces. A document comes in parts."""
    for parts in documents:
        text, first, searched = "", True, _PIECE_CHARACTERS
        for part in parts:
            text += part
            start = 0
            while (found := _PIECE_END.search(text, searched)) is not None:
                yield _Piece(text[start : found.end()], first, last=False)
                start, first = found.end(), False
                searched = start + _PIECE_CHARACTERS
            searched = max(searched, len(text)) - start
            text = text[start:]
        if text:
            yield _Piece(text, first, last=True)


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces grouped to about `_BATCH_CHARACTERS`."""
    batch: list[_Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
