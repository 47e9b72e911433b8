"""Finds data files by glob, here or at URLs, and identifies their contents without reading them
twice."""

import glob
import hashlib
import os
import sysconfig
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.data.files import fingerprint_of, unreadable, write_cached
from toolkit.data.remote import DataFile, RemoteFile, list_files, shown
from toolkit.errors import DataError
from toolkit.recipe.places import is_remote

STDLIB = "{stdlib}"
"""In a recipe, stands for the standard library folder of the running Python."""

_BINARY = (b"PAR1", b"ARROW1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")
"""How binary files begin that may hold much text: Parquet, Arrow, gzip, zstd, zip."""
_BEGINNING = 2**16
_UNDECODABLE = 0.3
"""Share of a file's first characters that cannot be decoded. Random bytes have 0.45."""

_SAMPLES = 1024
_SAMPLE_BYTES = 2**14
_UNSETTLED_S = 2.0
"""A file changed this recently may change again with the same time stamp."""


def find_files(patterns: Sequence[str]) -> list[DataFile]:
    """Files that match, each once: pattern by pattern, sorted by path within a pattern. The
    order does not depend on the file system.

    Raises DataError when a pattern matches no file.
    """
    return list(dict.fromkeys(file for one in patterns for file in _matching(one)))


def _matching(pattern: str) -> Sequence[DataFile]:
    """The files of a glob. Raises DataError where there is none."""
    fix = "correct the path; name the files below a folder by a glob, e.g. `FOLDER/**/*.txt`"
    if is_remote(pattern):
        if stored := list_files(pattern):
            return stored
        raise DataError(f"no file matches `{shown(pattern)}`", fix=fix)
    # Hidden files only by their name. The name of a file that exists is no glob.
    found = [_expand(pattern)]
    if not os.path.lexists(found[0]):
        found = sorted(glob.glob(_expand(pattern, glob.escape), recursive=True))  # noqa: PTH207
    paths = [Path(os.path.abspath(path)) for path in found]  # noqa: PTH100 - without `..`
    if files := [path for path in paths if path.is_file()]:
        return files
    raise DataError(f"no file matches `{_expand(pattern)}`", fix=fix)


def _expand(pattern: str, escape: Callable[[str], str] = str) -> str:
    return pattern.replace(STDLIB, escape(sysconfig.get_path("stdlib")))


def check_text(file: DataFile, beginning: bytes) -> None:
    """Raise DataError where a file begins as one of a binary format, or mostly with bytes that
    are NUL or not UTF-8."""
    found = "a Parquet, Arrow or compressed file" if beginning.startswith(_BINARY) else ""
    replaced, left_out = (
        len(getincrementaldecoder("utf-8")(errors).decode(beginning[:_BEGINNING]))
        for errors in ("replace", "ignore")
    )
    # UTF-16 of English is every other character NUL.
    wrong = replaced - left_out + beginning[:_BEGINNING].count(0)
    if wrong > _UNDECODABLE * replaced:
        found = f"of its first {replaced:,} characters, {wrong:,} are NUL or not UTF-8"
    if found:
        raise DataError(
            f"{file} is not text: {found}",
            fix="unpack it or convert it to UTF-8; for Parquet, Arrow and JSON files, also "
            "compressed ones, write `kind: hf` (or `kind: chat`, `kind: preference`) with its "
            "path; for Megatron's `.bin` and `.idx`, `kind: megatron`",
        )


def content_fingerprint(
    files: Sequence[DataFile], cache: Path, *, sampled: bool = False
) -> str:
    """Hash of the files' contents, in order, in hex. With `sampled`, samples of local files.

    The result is stored in `cache` under each file's metadata (path, inode, size, times of its
    last modification and last change; of a URL, what its store reports), so that a second run
    does not read them again.
    """
    try:
        listing = [_identity(file) for file in files]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from error
    memo = (
        cache / "fingerprints" / fingerprint_of(["samples", *listing] if sampled else listing)
    )
    try:
        return memo.read_text()
    except OSError:
        pass  # not seen before, or not readable: compute it
    hash_file = _hash_samples if sampled else _hash_file
    fingerprint = fingerprint_of([hash_file(file) for file in files])
    last_change_ns = max((changed for one in listing for changed in one[2:4]), default=0)
    if time.time() - last_change_ns / 1e9 > _UNSETTLED_S:
        write_cached(memo, fingerprint)
    return fingerprint


def _identity(file: DataFile) -> tuple[Any, ...]:
    if isinstance(file, RemoteFile):
        return file.url, file.identity
    # No program can set the time of the inode's change: every write and every rename moves
    # it, also where the old modification time is put back. The device's number is left out:
    # machines that share a file system count devices differently.
    found = file.stat()
    return str(file), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _hash_file(file: DataFile) -> str:
    try:
        stream: Any
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(file, error) from error


def _hash_samples(path: Any) -> str:
    """Hash, in hex, of a file's size and of `_SAMPLES` pieces that are spread evenly over it.
    Up to 16 MiB they are all of it."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            last = max(size - _SAMPLE_BYTES, 0)
            hashed = hashlib.sha256(str(size).encode())
            for start in sorted({last * n // (_SAMPLES - 1) for n in range(_SAMPLES)}):
                hashed.update(os.pread(stream.fileno(), _SAMPLE_BYTES, start))
            return hashed.hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error
