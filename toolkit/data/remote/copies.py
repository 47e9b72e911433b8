"""Remote files that are needed whole, copied into the cache once.

    cache/remote/files/IDENTITY/NAME        a copy; NAME.xxh128 is its hash when it was made
    cache/remote/trees/HASH/bucket/web/…    links to the copies of one listing, at their paths,
                                            so that messages name them

A copy gets its name when it is complete. An interrupted copy continues where it stopped.
"""

import glob
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar
from urllib.parse import urlsplit

from toolkit.data.files import (
    cache_not_writable,
    damage_hash,
    fingerprint_of,
    held_lock,
    write_cached,
)
from toolkit.data.progress import Track
from toolkit.data.remote.store import RemoteFile, list_files, listed_url, read_range, shown
from toolkit.errors import DataError
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import RowsSource, TextSource

FileSource = TypeVar("FileSource", bound=TextSource | RowsSource)

_PIECE_BYTES = 2**23
_AT_ONCE = 8
"""Pieces that are fetched at the same time."""


def with_copies(source: FileSource, cache: Path, track: Track) -> FileSource:
    """The source with the paths of copies in `cache` where it names remote files.

    Raises DataError when no file matches, or one cannot be read.
    """
    if not any(map(is_remote, source.places)):
        return source
    if isinstance(source, TextSource):
        return source.model_copy(update=_text_copies(source, cache, track))
    path = source.path
    if found := list_files(path):
        tree = _tree(found, cache, track)
        several = any(sign in path for sign in "*[")
        local = tree / "**" / "*" if several else tree / _place(found[0].url)
    else:
        found = _some(list_files(f"{path.rstrip('/')}/**/*"), path)
        local = _tree(found, cache, track) / _place(listed_url(path))
    return source.model_copy(update={"path": str(local)})


def _text_copies(source: TextSource, cache: Path, track: Track) -> dict[str, tuple[str, ...]]:
    """The settings `files` and `exclude` with paths of copies."""
    files = list[str]()
    for pattern, found in stored_texts(source):
        if found is None:
            files.append(pattern)
        else:
            tree = _tree(found, cache, track)
            files += [glob.escape(str(tree / _place(file.url))) for file in found]
    here = [pattern for pattern in source.exclude if not is_remote(pattern)]
    return {"files": tuple(files), "exclude": tuple(here)}


def stored_texts(source: TextSource) -> Iterator[tuple[str, list[RemoteFile] | None]]:
    """Each pattern of `files`, with those that it names in a store, without what `exclude`
    names; None for one of this machine. Raises DataError for a pattern without any."""
    left_out = {
        file.url
        for pattern in filter(is_remote, source.exclude)
        for file in [*list_files(pattern), *list_files(f"{pattern.rstrip('/')}/**/*")]
    }
    for pattern in source.files:
        if is_remote(pattern):
            found = [file for file in list_files(pattern) if file.url not in left_out]
            yield pattern, _some(found, pattern)
        else:
            yield pattern, None


def _some(found: list[RemoteFile], pattern: str) -> list[RemoteFile]:
    if found:
        return found
    fix = "correct the path; use `**/*.txt` for the files below a folder"
    raise DataError(f"no file matches `{shown(pattern)}`", fix=fix)


def _place(url: str) -> PurePosixPath:
    """Where a file lies in a tree: bucket and path."""
    parts = urlsplit(url)
    whole = f"{parts.netloc.rpartition('@')[2]}/{parts.path}"
    return PurePosixPath(*(part for part in whole.split("/") if part not in ("", ".", "..")))


def _tree(files: Sequence[RemoteFile], cache: Path, track: Track) -> Path:
    """A folder with the files at their places."""
    listing = fingerprint_of([[file.url, file.identity] for file in files])
    tree = cache / "remote" / "trees" / listing
    copies = copied(files, cache, track)
    try:
        for file, copy in zip(files, copies, strict=True):
            link = tree / _place(file.url)
            link.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                link.symlink_to(os.path.relpath(copy, link.parent))
    except OSError as error:
        raise cache_not_writable(tree, error) from error
    return tree


def copied(files: Sequence[RemoteFile], cache: Path, track: Track) -> list[Path]:
    """Copies of the files in the cache, made where there are none; one process at a time makes
    that of a file. Raises DataError where one cannot be read, or the cache not be written."""
    paths = [
        cache / "remote" / "files" / file.identity / _place(file.url).name for file in files
    ]
    lacking = [
        (file, path) for file, path in zip(files, paths, strict=True) if not path.exists()
    ]
    pieces = sum(-(-file.size // _PIECE_BYTES) for file, _ in lacking)
    for _ in track(_made(lacking), "copying remote files", pieces):
        pass
    return paths


def _made(lacking: Sequence[tuple[RemoteFile, Path]]) -> Iterator[None]:
    """Makes copies, and yields for each piece that is written."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for file, path in lacking:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with held_lock(path.with_name(path.name + ".lock"), "copying"):
                    if not path.exists():
                        yield from _copy(file, path, pool)
            except OSError as error:
                raise cache_not_writable(path.parent, error) from error


def _copy(file: RemoteFile, path: Path, pool: ThreadPoolExecutor) -> Iterator[None]:
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("a+b") as stream:
        # All pieces but the last were on the disk before the next was written.
        done = max(stream.tell() // _PIECE_BYTES - 1, 0) * _PIECE_BYTES
        stream.truncate(done)
        stream.seek(0)
        hashed = damage_hash()
        for _ in range(0, done, _PIECE_BYTES):
            hashed.update(stream.read(_PIECE_BYTES))
            yield
        for piece in _pieces(file, done, pool):
            stream.write(piece)
            hashed.update(piece)
            _sync(stream)
            yield
        write_cached(hash_path(path), hashed.hexdigest())
    unfinished.replace(path)


def hash_path(copy: Path) -> Path:
    return copy.with_name(copy.name + ".xxh128")


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _pieces(file: RemoteFile, start: int, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    """The file from `start` on, while the next pieces are being fetched."""
    starts = iter(range(start, file.size, _PIECE_BYTES))
    ahead = deque(
        pool.submit(_piece, file, at) for _, at in zip(range(_AT_ONCE), starts, strict=False)
    )
    while ahead:
        piece = ahead.popleft().result()
        ahead.extend(pool.submit(_piece, file, at) for at in [next(starts, None)] if at)
        yield piece


def _piece(file: RemoteFile, start: int) -> bytes:
    return read_range(file, start, min(start + _PIECE_BYTES, file.size))
