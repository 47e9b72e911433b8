"""Rows of local JSON files, each with its position, and their errors.

A file is read line by line, and a list row by row, up to a limit: a small compressed file may
hold a line that does not fit into memory.
"""

import bz2
import gzip
import json
import lzma
import re
import zlib
from codecs import BOM_UTF8, getincrementaldecoder
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

from toolkit.errors import BackendUnavailable, DataError
from toolkit.units import MIB

OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open,
}  # fmt: skip
"""How compressed files are opened, by their ending."""
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
_FIX = "check that the file is whole and UTF-8"
_BLOCK_BYTES = 2**20
_SEARCHED_BYTES = 2**30
"""How far `first_wrong_text` reads: a few seconds."""
_NESTED = 1000
"""More brackets in a line may crash the parser of `datasets`, which nests without a limit."""
_SPACE = re.compile(r"\s*")
_SCANNED = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Broken:
    """Placeholder for a row that is not JSON."""

    why: str


_TOO_DEEP = Broken("it is nested too deeply")


def is_json(file: Path) -> bool:
    """Whether the name has such an ending."""
    name = file.with_suffix("") if file.suffix in (*OPENERS, ".zst") else file
    return name.suffix in (".json", ".jsonl")


def open_plain(file: Path, stream: Any = None) -> Any:
    """The bytes of a file, or of a stream of it, not compressed.

    Raises BackendUnavailable where a package is missing.
    """
    opener = opener_of(file.suffix, file)
    if opener is None:
        return file.open("rb") if stream is None else stream
    plain = opener(file if stream is None else stream, "rb")
    return BufferedReader(plain) if file.suffix == ".zst" else plain


def opener_of(ending: str, what: object) -> Callable[..., Any] | None:
    """How files of the ending are opened; None for those that are not compressed.

    Raises BackendUnavailable, naming `what` is to be read, where a package is missing.
    """
    if ending != ".zst":
        return OPENERS.get(ending)
    try:
        import zstandard
    except ImportError as error:
        raise BackendUnavailable(
            f"{what} needs the package `zstandard`", fix="pip install zstandard"
        ) from error
    return zstandard.open


def undecodable() -> tuple[type[Exception], ...]:
    """Exceptions of reading compressed files."""
    try:
        from zstandard import ZstdError
    except ImportError:
        return UNREADABLE
    return (*UNREADABLE, ZstdError)


def numbered_lines(file: Path, limit_mib: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, blank ones too, each with its number from 1.

    Raises DataError when the file cannot be read, and for a line longer than the limit.
    """
    number, limit = 0, limit_mib * MIB
    try:
        with open_plain(file) as stream:
            while line := stream.readline(limit + 1):
                number += 1
                if len(line) > limit:
                    raise too_long(f"{file}:{number}", limit_mib)
                yield number, line
    except undecodable() as error:
        raise _unreadable(file, number, error) from error


def count_rows(files: Iterable[Path], limit_mib: int) -> int:
    """Rows of the lists, and lines of the other files, blank ones too. Raises as `json_rows`
    does."""
    found: Iterable[object] = chain.from_iterable(
        (json_rows if _is_list(file) else numbered_lines)(file, limit_mib) for file in files
    )
    return sum(1 for _ in found)


def too_long(place: str, limit_mib: int) -> DataError:
    """The error of a row that is longer than the limit."""
    return DataError(
        f"{place}: the row is longer than {limit_mib:,} MiB, the limit",
        fix="correct the file, or raise `row_limit_mib` next to `path`",
    )


def check_bounds(file: Path, limit_mib: int) -> None:
    """Raise DataError for a row of JSON or text that is longer than the limit or nested too
    deeply: `datasets` has no such limits."""
    if _is_list(file):
        deque(json_rows(file, limit_mib), maxlen=0)
        return
    for number, line in numbered_lines(file, limit_mib):
        nested = is_json(file) and line.count(b"[") + line.count(b"{") > _NESTED
        if nested and _parsed(line) == _TOO_DEEP:
            raise DataError(f"{file}:{number}: {_TOO_DEEP.why}", fix=_FIX)


def json_rows(file: Path, limit_mib: int) -> Iterator[tuple[str, object]]:
    """The rows of a file, one list of them or one a line, each with its place.

    A line that is not JSON is `Broken`. Raises DataError when the file cannot be read, is a
    list that is not JSON, or has a row longer than the limit.
    """
    if _is_list(file):
        with open_plain(file) as stream:
            yield from rows_of_list(file, stream, limit_mib)
        return
    for number, line in numbered_lines(file, limit_mib):
        if _stripped(line):
            yield f"{file}:{number}", _parsed(line)


def _is_list(file: Path) -> bool:
    try:
        with open_plain(file) as stream:
            return is_json(file) and begins_list(stream.peek(_BLOCK_BYTES))
    except undecodable() as error:
        raise _unreadable(file, 0, error) from error


def begins_list(beginning: bytes) -> bool:
    """Whether a file that begins with these bytes is a list."""
    return _stripped(beginning).startswith(b"[")


def rows_of_list(name: object, stream: Any, limit_mib: int) -> Iterator[tuple[str, object]]:
    """The rows of the file `name`, which is a list, each with its place. Raises as `json_rows`
    does."""
    decode = getincrementaldecoder("utf-8-sig")().decode
    text, at, number = "", 0, 0
    while at >= 0:
        place = f"{name}, row {number + 1}"
        try:
            row, at = _next_row(text, at, number)
        except RecursionError:
            raise DataError(f"{place}: {_TOO_DEEP.why}", fix=_FIX) from None
        except json.JSONDecodeError as error:
            text, at = text[at:], 0
            if len(text) > limit_mib * MIB:
                raise too_long(place, limit_mib) from error
            if not (block := _read(name, stream, len(text))):
                raise DataError(f"{place}: it is not JSON ({error.msg})", fix=_FIX) from error
            try:
                text += decode(block)
            except UnicodeDecodeError as wrong:
                raise DataError(f"{place}: {_not_utf8(wrong)}", fix=_FIX) from wrong
            continue
        if at >= 0:
            number += 1
            yield place, row
    while block := _read(name, stream, 0):
        if block.strip():
            raise DataError(f"{name}: it goes on behind its list", fix=_FIX)


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


def _read(name: object, stream: Any, size: int) -> bytes:
    try:
        block: bytes = stream.read(max(size, _BLOCK_BYTES))
    except undecodable() as error:
        raise _unreadable(name, 0, error) from error
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


def _unreadable(name: object, line: int, error: Exception) -> DataError:
    behind = f" behind line {line:,}" if line else ""
    return DataError(f"cannot read {name}{behind}: {error}", fix=_FIX)


def first_wrong_text(files: Sequence[Path], column: str, limit_mib: int) -> str | None:
    """The place of the first row whose `column` is not text or null, and why; None where none
    is found in the first GiB.

    Raises DataError when a file cannot be read.
    """
    searched = 0
    for file in filter(is_json, files):
        for place, row in json_rows(file, limit_mib):
            if (why := wrong_text(row, column)) is not None:
                return f"{place}: {why}"
            searched += len(row.get(column) or "") if isinstance(row, dict) else 0
            if searched > _SEARCHED_BYTES:
                return None
    return None


def lines_of(block: bytes) -> Iterator[tuple[int, object]]:
    """The rows of some lines, each with the number of its line, from 0."""
    for number, line in enumerate(block.split(b"\n")):
        if _stripped(line):
            yield number, _parsed(line)


def wrong_text(row: object, column: str) -> str | None:
    """Why the `column` of a row is not text or null; None if it is."""
    if isinstance(row, Broken):
        return row.why
    if not isinstance(row, dict):
        return f"it is {_kind(row)}, not an object with the column `{column}`"
    text = row.get(column)
    if text is None:
        return None
    if not isinstance(text, str):
        return f"`{column}` holds {_kind(text)}, not text"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"`{column}` holds half a surrogate pair at character {error.start + 1:,}"
    return None


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {str: "a text", list: "a list", dict: "a map", bool: "a boolean"}
    return kinds.get(type(value), "a number")
