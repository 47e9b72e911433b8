"""The files of a source of text in chunks of about equal size, known from a listing alone.

A chunk is tokenised as one unit: several small files, or a byte range of a large one. A line
belongs to the range in which it begins, a row group of a Parquet file to the range that holds
its middle, so that nothing has to be read to know how many chunks there are.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from toolkit.data.files import unreadable
from toolkit.data.mds import MdsShard
from toolkit.data.remote.store import RemoteFile, RemoteStream, read_range, shown
from toolkit.errors import DataError

_CUT_ANYWHERE = (".jsonl", ".txt", ".parquet")
"""Files of rows that can be read from any byte on."""


_READ_BYTES = 2**20
"""Smallest request to a store."""


@dataclass(frozen=True)
class ListedFile:
    """A file as it was when the run listed it."""

    path: Path
    """Of a file in a store, made of its URL."""
    size: int
    """Bytes."""
    version: int | str
    """Time of the last modification in ns, or what the store says of the contents."""
    remote: RemoteFile | None = None
    shard: MdsShard | None = field(default=None, compare=False)
    """What the index says of an MDS shard."""

    def __str__(self) -> str:
        return str(self.path) if self.remote is None else shown(self.remote.url)

    @classmethod
    def stored(cls, file: RemoteFile) -> "ListedFile":
        """A file in a store."""
        return cls(Path(shown(file.url)), file.size, file.identity, file)

    @classmethod
    def of(cls, path: Path) -> "ListedFile":
        """The file's current metadata. Raises DataError if there is no such file."""
        try:
            found = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        return cls(path, found.st_size, found.st_mtime_ns)

    def open(self) -> BinaryIO:
        """The file's bytes."""
        if self.remote is None:
            return self.path.open("rb")
        # Not through the cache of blocks: what is tokenised is not read again.
        return BufferedReader(RemoteStream(read_range, self.remote), _READ_BYTES)

    def check_unchanged(self) -> None:
        """Raise DataError when it is no longer the file that was listed; reading a file in a
        store does."""
        if self.remote is None and ListedFile.of(self.path) != self:
            raise DataError(
                f"{self.path} has changed since this run listed its files",
                fix="start the run again; where it has checkpoints, restore the file, or start "
                "in another directory (--run-dir)",
            )


@dataclass(frozen=True)
class FileRange:
    """The bytes [start, stop) of a file."""

    file: ListedFile
    start: int
    stop: int


def identities(files: Sequence[ListedFile]) -> list[tuple[str, int, int | str]]:
    """The identity of the files: name in their common folder, size and time of the last
    modification, or the store's checksum. They are not read, and their folder may be moved."""
    # Paths and URLs share none.
    alike = len({file.remote is None for file in files}) == 1
    shared = os.path.commonpath([file.path.parent for file in files]) if alike else ""
    return [
        (os.path.relpath(file.path, shared) if alike else str(file), file.size, file.version)
        for file in files
    ]


class Chunks(Sequence[tuple[FileRange, ...]]):
    """The chunks of some files. Memory grows with the files, not with their chunks."""

    def __init__(self, files: Sequence[ListedFile], target: int, *, whole: bool) -> None:
        """Of `target` bytes; no file is cut if they are to be `whole`."""
        self._files = files
        self._groups = list(_groups(files, target, whole=whole))
        self._behind = list(accumulate(parts for _, _, parts in self._groups))

    def __len__(self) -> int:
        """Number of chunks."""
        return self._behind[-1] if self._behind else 0

    def __getitem__(self, number: int) -> tuple[FileRange, ...]:  # type: ignore[override]
        group = bisect_right(self._behind, number)
        first, behind, parts = self._groups[group]
        if parts == 1:
            return tuple(FileRange(file, 0, file.size) for file in self._files[first:behind])
        file, part = self._files[first], number - self._behind[group] + parts
        start, stop = (file.size * edge // parts for edge in (part, part + 1))
        return (FileRange(file, start, stop),)


def _groups(
    files: Iterable[ListedFile], target: int, *, whole: bool
) -> Iterator[tuple[int, int, int]]:
    """First file, file behind the last, and number of chunks: several files in one chunk, or
    one file in several."""
    first, gathered, number = 0, 0, -1
    for number, file in enumerate(files):
        cut = not whole and file.path.suffix in _CUT_ANYWHERE and file.size > target
        if first < number and (cut or gathered + file.size > target):
            yield first, number, 1
            first, gathered = number, 0
        if cut:
            yield number, number + 1, -(-file.size // target)
            first = number + 1
        else:
            gathered += file.size
    if first <= number:
        yield first, number + 1, 1
