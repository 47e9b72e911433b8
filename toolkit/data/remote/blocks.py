"""A local block cache of remote files, limited in size.

    cache = BlockCache(folder, limit_bytes=50 * 2**30)
    data = cache.read(file, 10**12, 10**12 + 8192)     # fetches the blocks that are not here

Each block is a separate file, named by the identity of the remote file and its index, with its
hash in front. It is written under a temporary name and renamed, so any number of processes may
share the folder and any of them may be killed at any time; a damaged block is fetched again. A
process that has written much checks whether the folder exceeds its limit and removes the oldest
files; a reader that has one of them open is not affected, others fetch it again.

fsspec's own caches are not used: `blockcache` lists its blocks in one file per folder that
processes overwrite for each other, `filecache` and `simplecache` copy whole files, none checks
what it reads, and none is bounded in size.
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.files import damage_hash
from toolkit.data.remote.store import RemoteFile, read_range
from toolkit.system.atomic import write_atomically

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**18
"""A sample of a few thousand tokens costs one request of this size."""
_REQUEST_BLOCKS = 32
"""Adjacent blocks that one request fetches at most: 8 MiB."""
_REQUESTS_AT_ONCE = 16
"""Of blocks that are expected."""
_MOST_EXPECTED = 512
"""They are in memory until they are read: 128 MiB."""
_HASH_BYTES = damage_hash().digest_size
_LOOK_SHARE = 64
"""A process looks at the folder's size after writing this part of the limit."""
_LEFT_SHARE = 7 / 8
"""Of the limit, that is left when blocks are removed."""


class _Ahead:
    """Blocks that a process has asked for, and not read."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.coming: dict[tuple[str, int], Future[bytes]] = {}
        self.pool = ThreadPoolExecutor(_REQUESTS_AT_ONCE, "remote")


class BlockCache:
    """Blocks of remote files in a folder that processes share. Safe in threads."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """The folder may hold `limit_bytes`, and what is written meanwhile: with 8 processes,
        an eighth more at most."""
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._written = limit_bytes  # of an earlier process: look at the first block
        self._ahead = _Ahead()
        self._complained = False

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """The bytes `start … stop - 1` of the file. Raises DataError as `read_range` does."""
        first, behind = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        numbers = range(first, max(behind, first))
        blocks = {number: self._kept(file, number) for number in numbers}
        for lacking, run in groupby(numbers, lambda number: blocks[number] is None):
            if lacking:
                blocks.update(self._fetched(file, list(run)))
        data = b"".join(block for block in blocks.values() if block is not None)
        return data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def expect(self, file: RemoteFile, start: int, stop: int) -> None:
        """Prefetch data that `read` will return, without blocking; of large ranges, only the
        first blocks."""
        ahead = self._own_ahead()
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            key = (file.identity, number)
            if len(ahead.coming) >= _MOST_EXPECTED:
                return
            if key not in ahead.coming and not self._path(file, number).exists():
                ahead.coming[key] = ahead.pool.submit(self._fetched_one, file, number)

    def _own_ahead(self) -> "_Ahead":
        """What this process fetches ahead. It has no threads of one that forked it."""
        if self._ahead.process != os.getpid():
            self._ahead = _Ahead()
        return self._ahead

    def _fetched_one(self, file: RemoteFile, number: int) -> bytes:
        ((_, block),) = self._fetched(file, [number])
        return block

    def _fetched(self, file: RemoteFile, numbers: list[int]) -> Iterator[tuple[int, bytes]]:
        """Adjacent blocks, from the remote file; kept."""
        for at in range(0, len(numbers), _REQUEST_BLOCKS):
            some = numbers[at : at + _REQUEST_BLOCKS]
            start = some[0] * BLOCK_BYTES
            data = read_range(file, start, min((some[-1] + 1) * BLOCK_BYTES, file.size))
            for place, number in enumerate(some):
                block = data[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
                self._keep(file, number, block)
                yield number, block

    def _path(self, file: RemoteFile, number: int) -> Path:
        return self.folder / file.identity / f"{number:x}"

    def _kept(self, file: RemoteFile, number: int) -> bytes | None:
        coming = self._own_ahead().coming.pop((file.identity, number), None)
        if coming is not None:
            return coming.result()
        path = self._path(file, number)
        try:
            content = path.read_bytes()
        except OSError:  # not here, removed meanwhile, or not readable: fetched
            return None
        length = min(BLOCK_BYTES, file.size - number * BLOCK_BYTES)
        if len(content) == _HASH_BYTES + length and is_whole(content):
            return content[_HASH_BYTES:]
        logger.warning("a block in the data cache is damaged and is fetched again: %s", path)
        return None

    def _keep(self, file: RemoteFile, number: int, block: bytes) -> None:
        path = self._path(file, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, damage_hash(block).digest() + block)
        except OSError as error:  # training continues without it
            if not self._complained:
                logger.warning(
                    "cannot write to the data cache %s: %s; what is read of remote files is "
                    "fetched each time",
                    self.folder,
                    error.strerror or error,
                )
            self._complained = True
        self._written += len(block)
        if self._written > self._limit_bytes // _LOOK_SHARE:
            self._written = 0
            self._make_room()

    def _make_room(self) -> None:
        """Remove the oldest files, of killed processes too, where the folder is over its limit;
        one process at a time."""
        from filelock import FileLock, Timeout

        with suppress(OSError, Timeout), FileLock(self.folder / "room.lock", timeout=0):
            found = list(_files(self.folder))
            total = sum(size for _, size, _ in found)
            if total <= self._limit_bytes:
                return
            for _, size, path in sorted(found):
                path.unlink(missing_ok=True)
                total -= size
                if total <= self._limit_bytes * _LEFT_SHARE:
                    break


class BlockArray:
    """A remote file of numbers; a slice of it is an array."""

    def __init__(
        self, cache: BlockCache, file: RemoteFile, dtype: type[np.integer[Any]]
    ) -> None:
        self._cache = cache
        self._file = file
        self._dtype = dtype
        self.itemsize = np.dtype(dtype).itemsize

    def __len__(self) -> int:
        """Whole numbers in the file."""
        return self._file.size // self.itemsize

    def __getitem__(self, key: slice) -> npt.NDArray[Any]:
        """The numbers `start … stop - 1`. Raises DataError where they cannot be read."""
        start, stop, step = key.indices(len(self))
        assert step == 1, "consecutive numbers"
        size = self.itemsize
        data = self._cache.read(self._file, start * size, max(start, stop) * size)
        return np.frombuffer(data, dtype=self._dtype)

    def expect(self, start: int, stop: int) -> None:
        """See `BlockCache.expect`; in numbers."""
        self._cache.expect(self._file, start * self.itemsize, stop * self.itemsize)


def is_whole(content: bytes) -> bool:
    """Whether a block's file has the content that it was written with."""
    return content[:_HASH_BYTES] == damage_hash(memoryview(content)[_HASH_BYTES:]).digest()


def _files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Every block's file: when it was written, its bytes, its path."""
    for blocks in folder.iterdir():
        if blocks.is_dir():
            for path in blocks.iterdir():
                with suppress(FileNotFoundError):
                    found = path.stat()
                    yield found.st_mtime_ns, found.st_size, path
