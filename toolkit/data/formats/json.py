"""Files of JSON: a row a line, or one list of rows.

A file is read block by block, and a list row by row, up to a limit: a small compressed file may
hold a line that does not fit into memory. Rows are read here rather than by `datasets`: a
malformed row, or one whose values have different types than in other rows (arguments of tool
calls), then affects only that row, and an error names its file and line.
"""

import json
import re
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from toolkit.data.formats.base import Format
from toolkit.data.formats.columns import Broken, add_kinds
from toolkit.data.formats.compressed import opened, undecodable
from toolkit.data.formats.files import FileRange, ListedFile
from toolkit.data.formats.lines import (
    WHOLE,
    LinePlace,
    blocks,
    too_long,
    unreadable_lines,
)
from toolkit.errors import DataError
from toolkit.recipe.schema import RowsSource
from toolkit.text.units import MIB

_READ_BYTES = 2**20
_BEGINNING = 10 * 2**20
"""Bytes of a file whose columns are looked at: `datasets` takes them from as many."""
_SPACE = re.compile(r"\s*")
_SCANNED = json.JSONDecoder().raw_decode
_TOO_DEEP = Broken("it is nested too deeply")


class Json(Format):
    """A row of a file of lines, or of one list."""

    endings = (".json", ".jsonl")
    cut = (".jsonl",)
    states_columns = False
    in_folders = True

    def columns(self, files: Sequence[ListedFile]) -> tuple[dict[str, str], bool]:
        """See `Format.columns`: of the beginning of a file."""
        columns: dict[str, str] = {}
        all_seen = True
        for file in files:
            with opened(file) as stream:
                beginning = stream.read(_BEGINNING)
            all_seen &= _add_columns(columns, beginning) and len(beginning) < _BEGINNING
        return columns, all_seen

    def rows(self, source: RowsSource, part: FileRange) -> Iterator[tuple[object, object]]:
        """See `Format.rows`. A line that is not JSON is `Broken`; a list that is not is an
        error."""
        for place, block in blocks(part, source.row_limit_mib, _begins_list):
            if _is_list(place, block):
                yield from _rows_of_list(part, source.row_limit_mib)
            else:
                yield from _rows_of_lines(place, block)


def _is_list(place: LinePlace, block: bytes) -> bool:
    return place.start == place.line == 0 and _begins_list(block)


def _begins_list(block: bytes) -> bool:
    return _stripped(block[:_READ_BYTES]).startswith(b"[")


def _rows_of_lines(place: LinePlace, block: bytes) -> Iterator[tuple[LinePlace, object]]:
    for number, line in enumerate(block.split(b"\n")):
        if _stripped(line):
            yield place.behind(number), _parsed(line)


def _add_columns(columns: dict[str, str], beginning: bytes) -> bool:
    """Add the columns of the objects, one a line or in a list, that a file begins with; whether
    it holds nothing else."""
    text, at = beginning.decode(errors="replace"), 0
    with suppress(ValueError, RecursionError):  # the last object is truncated
        while at < len(text):
            if text[at] in "[],\n\r\t ":
                at += 1
                continue
            row, at = _SCANNED(text, at)
            if not isinstance(row, dict):
                columns.clear()
                return False
            add_kinds(columns, row)
    return at == len(text)


def _rows_of_list(part: FileRange, limit_mib: int) -> Iterator[tuple[str, object]]:
    """The rows of a file that is a list, each with its place."""
    name = part.file
    decode = getincrementaldecoder("utf-8-sig")().decode
    text, at, number = "", 0, 0
    with opened(name) as stream:
        while at >= 0:
            place = f"{name}, row {number + 1}"
            try:
                row, at = _next_row(text, at, number)
            except RecursionError:
                raise DataError(f"{place}: {_TOO_DEEP.why}", fix=WHOLE) from None
            except json.JSONDecodeError as error:
                text, at = text[at:], 0
                if len(text) > limit_mib * MIB:
                    raise too_long(place, limit_mib) from error
                if not (block := _read(part, stream, len(text))):
                    raise DataError(
                        f"{place}: it is not JSON ({error.msg})", fix=WHOLE
                    ) from error
                try:
                    text += decode(block)
                except UnicodeDecodeError as wrong:
                    raise DataError(f"{place}: {_not_utf8(wrong)}", fix=WHOLE) from wrong
                continue
            if at >= 0:
                number += 1
                yield place, row
        while block := _read(part, stream, 0):
            if block.strip():
                raise DataError(f"{name}: it goes on behind its list", fix=WHOLE)


def _next_row(text: str, at: int, number: int) -> tuple[object, int]:
    """The row behind `number` rows, and where it ends: -1 at the end of the list.

    Raises JSONDecodeError where that is not in the text.
    """
    at = _behind_space(text, at)
    if not (number and text.startswith("]", at)):
        if not text.startswith("," if number else "[", at):
            raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        at = _behind_space(text, at + 1)
        if number or not text.startswith("]", at):
            row, at = _SCANNED(text, at)
            if at == len(text):  # a number may go on
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
            return row, at
    if text[at + 1 :].strip():
        raise json.JSONDecodeError("Extra data", text, at)
    return None, -1


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it matches anything"
    return found.end()


def _read(part: FileRange, stream: Any, size: int) -> bytes:
    try:
        block: bytes = stream.read(max(size, _READ_BYTES))
    except undecodable() as error:
        raise unreadable_lines(part, error) from error
    return block


def _stripped(line: bytes) -> bytes:
    return line.removeprefix(BOM_UTF8).strip()


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Broken(_not_utf8(error))
    except json.JSONDecodeError as error:
        return Broken(f"it is not JSON ({error.msg}, character {error.colno:,})")
    except RecursionError:
        return _TOO_DEEP


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = f"0x{error.object[error.start]:02x}"
    return f"it is not UTF-8 (byte {byte} at {error.start + 1:,})"


JSON = Json()
