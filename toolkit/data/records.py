"""The rows of a source, each with its place: by their format, or by `datasets`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.data.files import content_fingerprint
from toolkit.data.formats.base import Format
from toolkit.data.formats.files import ListedFile
from toolkit.data.huggingface import hub_version, load_rows
from toolkit.data.listing import local_files, own_rows
from toolkit.data.progress import Track, untracked
from toolkit.data.remote.copies import with_copies
from toolkit.recipe.schema import RowsSource


@dataclass(frozen=True)
class Records:
    """The rows of a source, in a fixed order, as (place, value)."""

    source: RowsSource
    base: Path
    files: tuple[Path, ...]
    """Local files; none for a hub id."""
    version: str
    """Of the contents: stays the same when files are only moved."""

    @cached_property
    def own(self) -> tuple[Format, list[ListedFile]] | None:
        """The format that reads the files, and what it reads; None where `datasets` does."""
        return own_rows(self.source, self.base, self.files)

    @cached_property
    def dataset(self) -> Any:
        """The rows as `datasets` has them."""
        return load_rows(self.source, self.base, self.files)

    def __len__(self) -> int:
        """Number of rows, or a bound of it: blank lines count."""
        if self.own is None:
            return len(self.dataset)
        form, files = self.own
        return form.count(self.source, files)

    def __iter__(self) -> Iterator[tuple[object, object]]:
        if self.own is None:
            for number, row in enumerate(self.dataset, start=1):
                yield f"{self.source.path}, row {number}", row
            return
        form, files = self.own
        for file in files:
            yield from form.rows(self.source, file.whole)


def open_records(
    source: RowsSource, *, base: Path, cache: Path, track: Track = untracked
) -> Records:
    """Find the rows of `source`; relative paths start at `base`.

    `cache` is the folder with the hashes of files and copies of remote ones. Raises DataError
    if there are no files, BackendUnavailable if `datasets` is needed and missing.
    """
    source = with_copies(source, cache, track)
    files = local_files(source, base)
    if files is None:
        return Records(source, base, (), hub_version(source, base))
    return Records(source, base, tuple(files), content_fingerprint(files, cache))
