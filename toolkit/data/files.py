"""Finds local files by glob, and identifies their contents without reading them twice."""

import glob
import hashlib
import json
import logging
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import xxhash

from toolkit.data.progress import Track
from toolkit.errors import DataError
from toolkit.recipe.places import is_remote
from toolkit.system.atomic import write_atomically
from toolkit.text.redact import redact

logger = logging.getLogger(__name__)

STDLIB = "{stdlib}"
"""In a recipe, stands for the standard library folder of the running Python."""

_ROWS = "write `kind: hf` (or `kind: chat`, `kind: preference`) with its path"
_UNPACK = "unpack it; for rows of compressed JSON lines, " + _ROWS
_SIGNATURES = {
    b"PAR1": ("a Parquet file", _ROWS),
    b"ARROW1": ("an Arrow file", _ROWS),
    b"\x1f\x8b": ("compressed with gzip", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", _UNPACK),
    b"PK\x03\x04": ("a zip archive", _UNPACK),
}
"""How binary files begin that are taken for text, what they are, and the way to read them."""

_MOMENT_S = 1.0
_PIECE_BYTES = 2**24
_HASH_THREADS = min(16, os.cpu_count() or 1)
"""Faster than any disk, and at most 256 MiB of pieces in memory."""
_SAMPLES = 1024
_SAMPLE_BYTES = 2**14
_UNSETTLED_S = 2.0
"""A file changed this recently may change again with the same time stamp."""


damage_hash = xxhash.xxh3_128
"""Hash of cache files, to detect damage, at memory speed."""


def cache_folder(configured: str | None, base: Path) -> Path:
    """Folder for tokenised data: the recipe's, else `$DMT_CACHE`, else `~/.cache/dmt`.

    Raises DataError for a URL.
    """
    chosen = configured or os.environ.get("DMT_CACHE")
    if chosen and is_remote(chosen):
        fix = "name a folder on this machine, or one that machines share, without a URL"
        raise DataError(f"the data cache is `{redact(chosen)}`, which is a URL", fix=fix)
    return base / Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "dmt"


def find_files(patterns: Sequence[str], base: Path, exclude: Sequence[str] = ()) -> list[Path]:
    """Files that match, each once: pattern by pattern, sorted by path within a pattern.

    Relative patterns start at `base`. The order does not depend on the file system.
    Excluding a folder excludes everything below it.

    Raises DataError when a pattern matches no file.
    """
    left_out = {path for pattern in exclude for path in matching_paths(pattern, base)}
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [path for path in matching_paths(pattern, base) if path.is_file()]
        if not matches and Path(_expand(pattern, base)).is_dir():
            inside = f"{pattern.rstrip('/')}/**/*.txt"
            raise DataError(
                f"`{pattern}` is a folder", fix=f"write a glob of its files, e.g. `{inside}`"
            )
        if not matches:
            raise DataError(
                f"no file matches `{pattern}` (looked in {_expand(pattern, base)})",
                fix="correct the path; use `**/*.txt` for the files below a folder",
            )
        kept = (path for path in matches if not ({path, *path.parents} & left_out))
        found.update(dict.fromkeys(kept))
    if not found:
        raise DataError(
            f"`exclude` leaves none of the files that match {', '.join(patterns)}",
            fix="narrow the globs under `exclude`",
        )
    return list(found)


def find_texts(patterns: Sequence[str], base: Path, exclude: Sequence[str] = ()) -> list[Path]:
    """`find_files`, each of text. Raises DataError also for a known binary format."""
    found = find_files(patterns, base, exclude)
    for path in found:
        try:
            with path.open("rb") as stream:
                start = stream.read(max(map(len, _SIGNATURES)))
        except OSError as error:
            raise unreadable(path, error) from error
        for signature, (what, fix) in _SIGNATURES.items():
            if start.startswith(signature):
                raise DataError(f"{path} is {what}, not text", fix=fix)
    return found


def _expand(pattern: str, base: Path) -> str:
    stdlib = glob.escape(sysconfig.get_path("stdlib"))
    expanded = os.path.expanduser(pattern.replace(STDLIB, stdlib))  # noqa: PTH111 - a glob
    return expanded if os.path.isabs(expanded) else f"{glob.escape(str(base))}/{expanded}"  # noqa: PTH117


def matching_paths(pattern: str, base: Path) -> list[Path]:
    """Files and folders that match a glob, sorted; hidden ones only by their name."""
    found = glob.glob(_expand(pattern, base), recursive=True)  # noqa: PTH207
    return [Path(os.path.normpath(path)) for path in sorted(found)]


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises DataError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def content_fingerprint(
    files: Sequence[Path], cache: Path, hash_file: Callable[[Path], str] | None = None
) -> str:
    """Hash of the files' contents, in order; hex. `hash_file` is that of one file.

    The result is stored in `cache` under each file's metadata (path, inode, size, times of its
    last modification and last change), so that a second run does not read them again.
    """
    try:
        listing = [_identity(path) for path in files]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from error
    memo = cache / "fingerprints" / fingerprint_of(listing)
    try:
        return memo.read_text()
    except OSError:
        pass  # not seen before, or not readable: compute it
    fingerprint = fingerprint_of([(hash_file or _hash_file)(path) for path in files])
    last_change_ns = max(max(modified, changed) for _, _, modified, changed, _ in listing)
    if time.time() - last_change_ns / 1e9 > _UNSETTLED_S:
        write_cached(memo, fingerprint)
    return fingerprint


def fingerprint_of(value: object) -> str:
    """Hash of a value made of strings, numbers, None, lists and dicts; hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_cached(path: Path, content: str | bytes) -> None:
    """Write a file of the data cache atomically.

    Raises DataError when the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise cache_not_writable(path.parent, error) from error


def held_lock(path: Path, doing: str) -> AbstractContextManager[object]:
    """Hold the lock; a message is shown if waiting takes longer than a moment."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        return lock.acquire(timeout=_MOMENT_S)
    except Timeout:
        logger.warning("another process is %s the same data; waiting for it", doing)
        return lock.acquire()


def cache_not_writable(folder: Path, error: OSError) -> DataError:
    """The error if tokenised data cannot be stored."""
    return DataError(
        f"cannot write to the data cache {folder}: {error.strerror or error}",
        fix="name a folder with enough space in `data.cache` or in $DMT_CACHE",
    )


def _identity(path: Path) -> tuple[str, int, int, int, int]:
    # No program can set the time of the inode's change: every write and every rename moves
    # it, also where the old modification time is put back. The device's number is left out:
    # machines that share a file system count devices differently.
    found = path.stat()
    return str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _hash_file(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def hash_in_pieces(path: Path, *, track: Track) -> str:
    """Hash of a large file's pieces, which several threads read and hash; hex.

    `track` shows how long it takes.
    """
    try:
        with path.open("rb") as stream, ThreadPoolExecutor(_HASH_THREADS) as pool:
            starts = range(0, os.fstat(stream.fileno()).st_size, _PIECE_BYTES)
            hashes = pool.map(partial(_hash_piece, stream.fileno()), starts)
            shown = track(hashes, f"hashing {path.name}", len(starts))
            return fingerprint_of(list(shown))
    except OSError as error:
        raise unreadable(path, error) from error


def _hash_piece(descriptor: int, start: int) -> str:
    piece = os.pread(descriptor, _PIECE_BYTES, start)
    return hashlib.sha256(piece).hexdigest()


def hash_samples(path: Path) -> str:
    """Hash of the size of a file and of `_SAMPLES` pieces that are spread evenly over it, which
    are all of it up to 16 MiB; hex."""
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


def unreadable(path: Path, error: OSError) -> DataError:
    """The error if a data file cannot be read."""
    return DataError(
        f"cannot read {path}: {error.strerror or error}",
        fix="make the file readable, or leave it out with `exclude`",
    )
