"""Files of lines, read in ranges: a line belongs to the range in which it begins."""

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from toolkit.data.formats.base import Format
from toolkit.data.formats.columns import TEXT, Broken, check_column
from toolkit.data.formats.compressed import is_compressed, opened, undecodable
from toolkit.data.formats.files import FileRange, ListedFile
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, RowsSource
from toolkit.text.units import MIB

BLOCK_BYTES = 2**23
WHOLE = "check that the file is whole and UTF-8"
_COUNTED_BYTES = 2**33
"""How far lines are counted to name that of a malformed row; behind that, its byte is named."""


class LinePlace(NamedTuple):
    """Names a line of a file."""

    file: ListedFile
    start: int
    """Byte of the line that is number 0."""
    line: int

    def __str__(self) -> str:
        if self.start > _COUNTED_BYTES:
            return f"{self.file}, line {self.line + 1:,} behind byte {self.start:,}"
        return f"{self.file}:{_lines_before(self.file, self.start) + self.line + 1}"

    def behind(self, lines: int) -> "LinePlace":
        """So many lines further on."""
        return LinePlace(self.file, self.start, self.line + lines)


@lru_cache(maxsize=1)
def _lines_before(file: ListedFile, at: int) -> int:
    lines, left = 0, at
    with opened(file) as stream:
        while left and (block := stream.read(min(left, BLOCK_BYTES))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def blocks(
    part: FileRange, limit_mib: int, other: Callable[[bytes], bool] = lambda _: False
) -> Iterator[tuple[LinePlace, bytes]]:
    """The lines that begin in the range, in blocks of whole ones, each with the place of its
    first; of a file whose beginning is `other` than lines, only that.

    Raises DataError when the file cannot be read, and for a line longer than the limit.
    """
    file, at, limit = part.file, part.start, limit_mib * MIB
    compressed = is_compressed(file.path)
    try:
        with opened(file) as stream:
            if at:
                stream.seek(at - 1)
                while (piece := stream.readline(BLOCK_BYTES)) and not piece.endswith(b"\n"):
                    at += len(piece)
                at += len(piece) - 1
            place = LinePlace(file, at, 0)
            while compressed or at < part.stop:
                block = stream.read(
                    BLOCK_BYTES if compressed else min(BLOCK_BYTES, part.stop - at)
                )
                if not block:
                    return
                if at == 0 and other(block):
                    yield place, block
                    return
                if not block.endswith(b"\n"):
                    block += stream.readline(limit + 1)
                if len(block) > limit:
                    _check_lengths(place, block, limit_mib)
                yield place, block
                at += len(block)
                place = place.behind(block.count(b"\n"))
    except undecodable() as error:
        raise unreadable_lines(part, error) from error


def _check_lengths(first: LinePlace, block: bytes, limit_mib: int) -> None:
    for number, line in enumerate(block.split(b"\n")):
        if len(line) > limit_mib * MIB:
            raise too_long(first.behind(number), limit_mib)


def too_long(place: object, limit_mib: int) -> DataError:
    """The error of a row that is longer than the limit."""
    return DataError(
        f"{place}: the row is longer than {limit_mib:,} MiB, the limit",
        fix="correct the file, or raise `row_limit_mib` next to `path`",
    )


def unreadable_lines(part: FileRange, error: Exception) -> DataError:
    """The error of a file that cannot be read, which says how many of its lines can."""
    lines = 0
    if part.start == 0:
        with suppress(*undecodable()), opened(part.file) as stream:
            while stream.readline(BLOCK_BYTES):
                lines += 1
    behind = f" behind line {lines:,}" if lines else ""
    return DataError(f"cannot read {part.file}{behind}: {error}", fix=WHOLE)


class Lines(Format):
    """A text file, each line of which is a document."""

    endings = (".txt",)
    cut = (".txt",)
    in_folders = True

    def columns(self, files: Sequence[ListedFile]) -> tuple[dict[str, str], bool]:
        del files
        return {"text": TEXT}, True

    def rows(self, source: RowsSource, part: FileRange) -> Iterator[tuple[object, object]]:
        if isinstance(source, HfSource):
            check_column(source, {"text": TEXT})
        for place, block in blocks(part, source.row_limit_mib):
            at_start = place.start == place.line == 0
            lines = block.removeprefix(BOM_UTF8 if at_start else b"").split(b"\n")
            for number, line in enumerate(lines if lines[-1] else lines[:-1]):
                try:
                    row: object = {"text": line.removesuffix(b"\r").decode()}
                except UnicodeDecodeError:
                    row = Broken("it is not UTF-8")
                yield place.behind(number), row


LINES = Lines()
