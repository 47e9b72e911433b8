"""Megatron's indexed dataset format: `PREFIX.bin` holds the tokens, `PREFIX.idx` the index.

The index file, little endian, without padding:

    9 bytes   magic `MMIDIDX\\0\\0`
    uint64    version, 1
    uint8     type of the tokens (`_DTYPES`)
    uint64    number of sequences S
    uint64    number of document marks D + 1
    int32     [S]      tokens of each sequence
    int64     [S]      byte offset of each sequence in PREFIX.bin
    int64     [D + 1]  first sequence of each document, ending with S

DMT writes one sequence per document, and behind the index, where Megatron's readers do not
look, `_SEAL` and the hash of both files, by which a start finds damage. Files made by
Megatron's own tools, with several sequences per document, are read as well. Both ways are
tested against megatron-core.
"""

import hashlib
import os
import struct
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.rows import Int64Array
from toolkit.errors import DataError

TokenArray = npt.NDArray[Any]

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_SEAL = b"DMT XXH3"
_hash = xxhash.xxh3_128
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_CHECKED_AT_ONCE = 2**20
_REBUILD = "build the pair of files again; both must come from the same, finished run"


def token_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """Smallest type of the format that holds every id below `vocab_size`."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Path of the index. It is written last: if it exists, the pair is complete."""
    return prefix.with_name(prefix.name + ".idx")


@dataclass(frozen=True)
class IndexedTokens:
    """A pair of files. Tokens are read lazily."""

    tokens: TokenArray
    """Token ids [total], memory-mapped, in the type they are stored in."""
    document_offsets: Int64Array
    """Byte offset of each document's first token, int64 [documents], ascending. May be a
    view into the (unaligned) index file: look things up with `bisect`, which reads a few
    elements, not with `np.searchsorted`, which would first copy all of it."""

    @property
    def n_documents(self) -> int:
        return len(self.document_offsets)

    def document_starts(self, documents: Int64Array) -> Int64Array:
        """Position of the first token of each document. For `n_documents`, the end."""
        known = documents < self.n_documents
        starts = np.full(len(documents), len(self.tokens), dtype=np.int64)
        starts[known] = self.document_offsets[documents[known]] // self.tokens.itemsize
        return starts


def read_indexed(prefix: Path) -> IndexedTokens:
    """Map the pair of files at `prefix`.

    Raises DataError when a file is missing, is not of this format, or does not fit the other.
    """
    index_file, token_file = idx_path(prefix), bin_path(prefix)
    for path in (index_file, token_file):
        if not path.is_file():
            raise no_file(str(prefix), str(path))
    index = _map(index_file, np.uint8)
    dtype, n_sequences, n_marks = _read_header(index_file, index)
    lengths, pointers, marks = _index_arrays(index_file, index, n_sequences, n_marks)
    n_tokens = _checked_total(index_file, dtype, lengths, pointers)
    size, itemsize = token_file.stat().st_size, np.dtype(dtype).itemsize
    if size != n_tokens * itemsize:
        raise DataError(
            f"{token_file} has {size:,} bytes; its index says {n_tokens:,} tokens of "
            f"{itemsize} bytes",
            fix=_REBUILD,
        )
    offsets = _document_offsets(index_file, pointers, marks)
    return IndexedTokens(_map(token_file, dtype), offsets)


def no_file(prefix: str, path: str) -> DataError:
    """The error if a pair of files lacks one."""
    return DataError(
        f"indexed data {prefix}: there is no file {path}",
        fix="give the path of the pair without `.bin`/`.idx`; both files are needed",
    )


def _map(path: Path, dtype: type[Any]) -> npt.NDArray[Any]:
    """The file as an array that is read page by page when it is used."""
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _read_header(path: Path, index: npt.NDArray[np.uint8]) -> tuple[type[Any], int, int]:
    """Token type, number of sequences and number of document marks."""
    fields = bytes(index[: _HEADER.size]).ljust(_HEADER.size, b"\0")
    magic, version, code, n_sequences, n_marks = _HEADER.unpack(fields)
    if (magic, version) != (_MAGIC, _VERSION) or code not in _DTYPES:
        raise DataError(
            f"{path} is not an index of Megatron's indexed format: it begins with "
            f"{magic!r}, version {version}, token type {code}, not {_MAGIC!r}, version "
            f"{_VERSION}, and one of the integer types {sorted(_DTYPES)}",
            fix=_REBUILD,
        )
    return _DTYPES[code], n_sequences, n_marks


def _index_arrays(
    path: Path, index: npt.NDArray[np.uint8], n_sequences: int, n_marks: int
) -> tuple[npt.NDArray[np.int32], Int64Array, Int64Array]:
    """Views of sequence lengths, byte offsets and document marks."""
    needed = _HEADER.size + 12 * n_sequences + 8 * n_marks
    if len(index) < needed:
        raise DataError(
            f"{path} is cut short: {len(index):,} bytes, {needed:,} expected", fix=_REBUILD
        )
    start = _HEADER.size
    lengths = index[start : start + 4 * n_sequences].view(np.int32)
    start += 4 * n_sequences
    pointers = index[start : start + 8 * n_sequences].view(np.int64)
    start += 8 * n_sequences
    return lengths, pointers, index[start : start + 8 * n_marks].view(np.int64)


def _checked_total(
    path: Path,
    dtype: type[Any],
    lengths: npt.NDArray[np.int32],
    pointers: Int64Array,
) -> int:
    """Number of tokens, after checking that the sequences lie end to end."""
    itemsize = np.dtype(dtype).itemsize
    expected_byte = 0
    for start in range(0, len(lengths), _CHECKED_AT_ONCE):
        sizes = lengths[start : start + _CHECKED_AT_ONCE].astype(np.int64) * itemsize
        ends = expected_byte + np.cumsum(sizes)
        if sizes.min() < 0 or not np.array_equal(
            pointers[start : start + _CHECKED_AT_ONCE], ends - sizes
        ):
            raise DataError(f"{path}: its sequences do not lie end to end", fix=_REBUILD)
        expected_byte = int(ends[-1])
    return expected_byte // itemsize


def _document_offsets(path: Path, pointers: Int64Array, marks: Int64Array) -> Int64Array:
    """Byte offset of each document. Sequences behind the last mark are one more document."""
    n_sequences = len(pointers)
    if len(marks) == n_sequences + 1 and np.array_equal(marks, np.arange(len(marks))):
        return pointers
    if len(marks) and (marks.min() < 0 or marks.max() > n_sequences):
        raise DataError(f"{path}: document marks lie outside its sequences", fix=_REBUILD)
    firsts = np.unique(marks[marks < n_sequences])
    return np.asarray(pointers[firsts], dtype=np.int64)


def write_indexed(
    prefix: Path, dtype: type[np.integer[Any]], documents: Iterable[npt.ArrayLike]
) -> None:
    """Write the token ids of each document, as a pair of files."""
    arrays = (np.asarray(document, dtype) for document in documents)
    write_chunks(prefix, dtype, ((tokens, [len(tokens)]) for tokens in arrays))


def write_chunks(
    prefix: Path,
    dtype: type[np.integer[Any]],
    chunks: Iterable[tuple[npt.ArrayLike, Sequence[int]]],
) -> None:
    """Write chunks of token ids [n], each with the lengths of the documents that end in it: a
    document may begin in an earlier chunk.

    Both files have temporary names until they are whole, and the index gets its name last. An
    error or Ctrl-C removes what was written. A kill leaves `.tmp` files, which are never read
    and which the next writer replaces.
    """
    hashed, lengths = _hash(), array("i")
    pair = bin_path(prefix), idx_path(prefix)
    unfinished = [path.with_name(f"{path.name}.tmp") for path in pair]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished[0].open("wb") as stream:
            for tokens, ended in chunks:
                ids = np.ascontiguousarray(tokens, dtype=dtype)
                stream.write(ids.data)
                hashed.update(ids.data)
                lengths.extend(ended)
            _sync(stream)
        with unfinished[1].open("wb") as stream:
            for part in _index_of(dtype, np.frombuffer(lengths, dtype=np.int32)):
                stream.write(part)
                hashed.update(part)
            stream.write(_SEAL + hashed.digest())
            _sync(stream)
        _set_same_time(*unfinished)
        pair[1].unlink(missing_ok=True)
        for path, whole in zip(unfinished, pair, strict=True):
            path.replace(whole)
    except OverflowError as error:
        raise DataError(
            f"document {len(lengths)} has {2**31:,} tokens or more, which the indexed format "
            "does not allow",
            fix="split it into several files or rows",
        ) from error
    finally:
        for path in unfinished:
            path.unlink(missing_ok=True)


def _index_of(dtype: type[np.integer[Any]], lengths: npt.NDArray[np.int32]) -> Iterator[bytes]:
    """The parts of the index of documents of so many tokens, each one sequence."""
    sizes, n = lengths.astype(np.int64) * np.dtype(dtype).itemsize, len(lengths)
    yield _HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], n, n + 1)
    yield lengths.tobytes()
    yield (np.cumsum(sizes) - sizes).tobytes()
    yield np.arange(n + 1, dtype=np.int64).tobytes()


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _set_same_time(*files: Path) -> None:
    """Give files one time of modification: as long as they share it, none has been changed."""
    now = time.time_ns()
    for file in files:
        os.utime(file, ns=(now, now))


def is_as_written(prefix: Path) -> bool:
    """Whether a pair of files is what DMT wrote, as far as a start can afford to know: only
    files that were modified, or copied without their times, are read and hashed. Files without
    a hash count as unchanged."""
    pair = bin_path(prefix), idx_path(prefix)
    if len({file.stat().st_mtime_ns for file in pair}) == 1:
        return True
    index, length = idx_path(prefix).read_bytes(), len(_SEAL) + _hash().digest_size
    if index[-length:].startswith(_SEAL):
        with bin_path(prefix).open("rb") as stream:
            hashed = hashlib.file_digest(stream, _hash)
        hashed.update(index[:-length])
        if not index.endswith(hashed.digest()):
            return False
    with suppress(PermissionError):  # of another user: it is hashed again the next time
        _set_same_time(*pair)
    return True
