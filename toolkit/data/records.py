"""The rows of a source, each with its place: by their format, or by `datasets`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from toolkit.data.files import content_fingerprint
from toolkit.data.formats.base import Format
from toolkit.data.formats.files import ListedFile
from toolkit.data.huggingface import (
    hub_version,
    load_rows,
    rows_of_dataset,
    slices,
    split_name,
)
from toolkit.data.listing import local_files, local_folder, split_files
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
    def index(self) -> tuple[Format, list[ListedFile]] | None:
        """The format whose index names all files of a local folder, and these files."""
        indexed = local_folder(self.source, self.base) if self.files else None
        if indexed is None or indexed[0].has_splits:
            return None
        form, folder = indexed
        return form, form.files(self.source, folder)

    @cached_property
    def _own(self) -> tuple[Format, list[ListedFile]] | None:
        """The format that reads the files, and those of the split; None where `datasets`
        reads."""
        return self.index or split_files(self.source, self.base, self.files)

    @cached_property
    def _dataset(self) -> Any:
        return load_rows(self.source, self.base, self.files)

    def __iter__(self) -> Iterator[tuple[object, object]]:
        if self._own is None:
            yield from rows_of_dataset(self.source, self._dataset)
        elif split_name(self.source) == self.source.split:
            yield from self._rows()
        else:
            n_rows = sum(1 for _ in self._rows())
            for start, stop in slices(self.source, self.files, n_rows):
                yield from islice(self._rows(), start, stop)

    def _rows(self) -> Iterator[tuple[object, object]]:
        assert self._own is not None
        form, files = self._own
        return chain.from_iterable(form.rows(self.source, file.whole) for file in files)


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
