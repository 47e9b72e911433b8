"""Files and folders as a run has listed them, here or in a store."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from toolkit.data.files import matching_paths, unreadable
from toolkit.data.remote.store import (
    RemoteFile,
    RemoteStream,
    listed_url,
    shown,
)
from toolkit.data.remote.store import list_files as stored_files
from toolkit.errors import DataError

_READ_BYTES = 2**20
"""Of a block, and of the smallest request to a store."""


@dataclass(frozen=True)
class ListedFile:
    """A file as it was when the run listed it."""

    path: Path
    """Of a file in a store, made of its URL."""
    size: int
    version: int | str
    """Time of the last modification in ns, or what the store says of the contents."""
    remote: RemoteFile | None = None
    format: str | None = field(default=None, compare=False)
    """The format that names it in an index of its folder; None: that of its ending."""
    entry: object = field(default=None, compare=False)
    """What that index says of it."""

    def __str__(self) -> str:
        return str(self.path) if self.remote is None else shown(self.remote.url)

    @classmethod
    def stored(cls, file: RemoteFile) -> "ListedFile":
        return cls(Path(shown(file.url)), file.size, file.identity, file)

    @classmethod
    def of(cls, path: Path) -> "ListedFile":
        """The file's current metadata. Raises DataError if there is no such file."""
        try:
            found = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        return cls(path, found.st_size, found.st_mtime_ns)

    @property
    def whole(self) -> "FileRange":
        return FileRange(self, 0, self.size)

    def open(self) -> BinaryIO:
        if self.remote is None:
            return self.path.open("rb")
        # Not through the cache of blocks: what is tokenised is not read again.
        return BufferedReader(RemoteStream(self.remote), _READ_BYTES)

    def blocks(self) -> Iterator[bytes]:
        """The file's bytes in blocks, none empty. Raises DataError when it cannot be read."""
        try:
            with self.open() as stream:
                while block := stream.read(_READ_BYTES):
                    yield block
        except OSError as error:
            raise unreadable(self.path, error) from error

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


@dataclass(frozen=True)
class ListedFolder:
    """All files of a folder, here or in a store."""

    name: str
    """As messages call it."""
    top: frozenset[str]
    """Names of the files that are directly in it."""
    listing: Callable[[], Mapping[str, ListedFile]]

    @cached_property
    def files(self) -> Mapping[str, ListedFile]:
        """By their place in it, sorted; none where there is no such folder. Listed once, when
        first asked for: a folder of a network file system may hold many."""
        return self.listing()

    @classmethod
    def here(cls, folder: Path) -> "ListedFolder":

        def listing() -> dict[str, ListedFile]:
            paths = [path for path in matching_paths("**/*", folder) if path.is_file()]
            return {str(path.relative_to(folder)): ListedFile.of(path) for path in paths}

        try:
            top = frozenset(entry.name for entry in os.scandir(folder) if entry.is_file())
        except OSError as error:
            raise unreadable(folder, error) from error
        return cls(str(folder), top, listing)

    @classmethod
    def stored(cls, url: str) -> "ListedFolder":
        root = listed_url(url).rstrip("/")
        files = stored_files(f"{root}/**/*")
        names = [file.url.removeprefix(f"{root}/") for file in files]
        listed = dict(zip(names, map(ListedFile.stored, files), strict=True))
        return cls(
            shown(url), frozenset(name for name in listed if "/" not in name), lambda: listed
        )

    def read(self, name: str, size: int = -1) -> bytes:
        """The content of a file, or its first bytes; empty if there is none."""
        if name not in self.files:
            return b""
        file = self.files[name]
        try:
            with file.open() as stream:
                return stream.read(size)
        except OSError as error:
            raise unreadable(file.path, error) from error
