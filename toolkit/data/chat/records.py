"""Rows of a chat data set, each with its position for errors.

Local JSON is read line by line rather than through `datasets`: a malformed row, or one whose
values have different types than in other rows (arguments of tool calls), then affects only that
row, and an error names its file and line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.data.files import content_fingerprint, fingerprint_of
from toolkit.data.json_rows import count_rows, json_rows
from toolkit.data.progress import Track, untracked
from toolkit.data.remote.copies import with_copies
from toolkit.data.sources import hub_version, load_rows, local_files, names_json
from toolkit.recipe.schema import RowsSource


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
            return count_rows(self.files, self.source.row_limit_mib)
        return len(self._dataset)

    def __iter__(self) -> Iterator[ChatRecord]:
        if self._read_here:
            for file in self.files:
                found = json_rows(file, self.source.row_limit_mib)
                yield from (ChatRecord(*row) for row in found)
            return
        for number, row in enumerate(self._dataset, start=1):
            yield ChatRecord(f"{self.source.path}, row {number}", row)

    @property
    def _read_here(self) -> bool:
        return names_json(self.source, self.base, self.files)

    @cached_property
    def _dataset(self) -> Any:
        return load_rows(self.source, self.base, self.files)


def open_records(
    source: RowsSource, *, base: Path, cache: Path, track: Track = untracked
) -> ChatRecords:
    """Find the rows of `source`; relative paths start at `base`.

    `cache` is the folder with the hashes of files and copies of remote ones. Raises DataError
    if there are no files, BackendUnavailable if `datasets` is needed and missing.
    """
    source = with_copies(source, cache, track)
    files = local_files(source, base)
    if files is None:
        version = hub_version(source, base)
        parts = ["hub", source.path, source.name, source.split, version]
        return ChatRecords(source, base, (), fingerprint_of(parts))
    parts = [content_fingerprint(files, cache), source.name, source.split]
    return ChatRecords(source, base, tuple(files), fingerprint_of(parts))
