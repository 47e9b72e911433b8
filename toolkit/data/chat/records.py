"""Rows of a chat data set, each with the place that an error names.

Local JSON is read line by line rather than through `datasets`: a malformed row, or one whose
values have other types than the same keys elsewhere (arguments of tool calls), then concerns
that row alone, and an error names its file and line.
"""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.data.files import content_fingerprint, fingerprint_of
from toolkit.data.sources import hub_version, load_rows, local_files
from toolkit.errors import DataError
from toolkit.recipe.schema import RowsSource

OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open,
}  # fmt: skip
"""How compressed files are opened, by their ending."""


@dataclass(frozen=True)
class ChatRecord:
    """One row, not yet parsed."""

    place: str
    """File and line, or data set and row, both counted from 1."""
    value: object
    """A dict of columns; anything else is malformed."""


@dataclass(frozen=True)
class ChatRecords:
    """The rows of a source, in a fixed order."""

    source: RowsSource
    base: Path
    files: tuple[Path, ...]
    """Local files; none for a hub id."""
    fingerprint: str
    """Changes with the contents; stays the same when files are only moved."""

    def __len__(self) -> int:
        """Number of rows; for JSON a bound, since blank lines count."""
        if self._read_here:
            return sum(_count_lines(file) for file in self.files)
        return len(self._dataset)

    def __iter__(self) -> Iterator[ChatRecord]:
        if self._read_here:
            for file in self.files:
                yield from _json_records(file)
            return
        for number, row in enumerate(self._dataset, start=1):
            yield ChatRecord(f"{self.source.path}, row {number}", row)

    @property
    def _read_here(self) -> bool:
        """Whether all files are JSON and all of their rows are wanted.

        In a folder, `datasets` finds by the files' names which split they belong to.
        """
        if not self.files or self.source.split != "train":
            return False
        in_folder = (self.base / Path(self.source.path).expanduser()).is_dir()
        return not in_folder and all(_json_suffix(file) for file in self.files)

    @cached_property
    def _dataset(self) -> Any:
        return load_rows(self.source, self.base, self.files)


def open_records(source: RowsSource, *, base: Path, cache: Path) -> ChatRecords:
    """Find the rows of `source`; relative paths start at `base`.

    `cache` is the folder that remembers the hashes of files. Raises DataError when there are
    no files, BackendUnavailable when `datasets` is needed and missing.
    """
    files = local_files(source, base)
    if files is None:
        version = hub_version(source, base)
        parts = ["hub", source.path, source.name, source.split, version]
        return ChatRecords(source, base, (), fingerprint_of(parts))
    parts = [content_fingerprint(files, cache), source.name, source.split]
    return ChatRecords(source, base, tuple(files), fingerprint_of(parts))


def _json_suffix(file: Path) -> bool:
    name = file.with_suffix("") if file.suffix in OPENERS else file
    return name.suffix in (".json", ".jsonl")


def _open(file: Path) -> Any:
    try:
        return OPENERS.get(file.suffix, open)(file, "rt", encoding="utf-8-sig")
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(
        f"cannot read {file}: {error}", fix="check that the file is whole and UTF-8"
    )


def _count_lines(file: Path) -> int:
    try:
        with _open(file) as stream:
            return sum(1 for _ in stream)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def _json_records(file: Path) -> Iterator[ChatRecord]:
    """The objects of a file: one list of them, or one object a line."""
    try:
        with _open(file) as stream:
            first = next((line for line in stream if line.strip()), "")
            stream.seek(0)
            if first.lstrip().startswith("["):
                rows = json.load(stream)
                yield from (
                    ChatRecord(f"{file}, row {n}", row) for n, row in enumerate(rows, 1)
                )
                return
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield ChatRecord(f"{file}:{number}", _json_value(line))
    except (OSError, EOFError, ValueError) as error:
        raise _unreadable(file, error) from error


def _json_value(line: str) -> object:
    with suppress(ValueError):
        return json.loads(line)
    return line  # which is no dict, and so malformed
