"""The files of a source of text in chunks of about equal size, known from a listing alone.

A chunk is tokenised as one unit: several small files, or a byte range of a large one. A line
belongs to the range in which it begins, a row group of a Parquet file to the range that holds
its middle, so that nothing has to be read to know how many chunks there are.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from toolkit.data.formats.base import format_of
from toolkit.data.formats.files import FileRange, ListedFile


class Chunks(Sequence[tuple[FileRange, ...]]):
    """The chunks of some files. Memory grows with the files, not with their chunks."""

    def __init__(self, files: Sequence[ListedFile], target: int, *, whole: bool) -> None:
        """Of `target` bytes; no file is cut if they are to be `whole`."""
        self._files = files
        self._groups = list(_groups(files, target, whole=whole))
        self._behind = list(accumulate(parts for _, _, parts in self._groups))

    def __len__(self) -> int:
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
        cut = file.size > target and not whole and _may_be_cut(file)
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


def _may_be_cut(file: ListedFile) -> bool:
    form = format_of(file)
    return form is not None and file.path.suffix in form.cut
