"""Rows of local JSON files, each with its position, and their errors."""

import bz2
import gzip
import json
import lzma
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import BackendUnavailable, DataError

OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open,
}  # fmt: skip
"""How compressed files are opened, by their ending."""
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
_FIX = "check that the file is whole and UTF-8"
_SEARCHED_BYTES = 2**30
"""How far `first_wrong_text` reads: a few seconds."""


@dataclass(frozen=True)
class Broken:
    """Placeholder for a row that is not JSON."""

    why: str


def is_json(file: Path) -> bool:
    """Whether the name has such an ending."""
    name = file.with_suffix("") if file.suffix in OPENERS else file
    return name.suffix in (".json", ".jsonl")


def open_json(file: Path) -> Any:
    """The file's bytes, not compressed."""
    return OPENERS.get(file.suffix, open)(file, "rb")


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


def count_lines(file: Path) -> int:
    """Lines of the file, blank ones too. Raises DataError when it cannot be read."""
    lines = 0
    try:
        with open_json(file) as stream:
            for _ in stream:
                lines += 1
    except UNREADABLE as error:
        raise _unreadable(file, lines, error) from error
    return lines


def json_rows(file: Path) -> Iterator[tuple[str, object]]:
    """The rows of a file, one list of them or one a line, each with its place.

    A line that is not JSON is `Broken`. Raises DataError when the file cannot be read, or is a
    list that is not JSON.
    """
    number = 0
    try:
        with open_json(file) as stream:
            first = next((text for line in stream if (text := _stripped(line))), b"")
            stream.seek(0)
            if first.startswith(b"["):
                yield from rows_of_list(str(file), stream.read())
                return
            for number, line in enumerate(stream, start=1):
                if _stripped(line):
                    yield f"{file}:{number}", _parsed(line)
    except UNREADABLE as error:
        raise _unreadable(file, number, error) from error


def rows_of_list(name: str, content: bytes) -> Iterator[tuple[str, object]]:
    """The rows of the file `name`, which is a list, each with its place."""
    whole = _parsed(content)
    if isinstance(whole, Broken):
        raise DataError(f"{name}: {whole.why}", fix=_FIX)
    assert isinstance(whole, list), "nothing else begins with a bracket"
    yield from ((f"{name}, row {n}", row) for n, row in enumerate(whole, 1))


def _stripped(line: bytes) -> bytes:
    return line.removeprefix(BOM_UTF8).strip()


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = f"0x{text[error.start]:02x}"
        return Broken(f"it is not UTF-8 (byte {byte} at {error.start + 1:,})")
    except json.JSONDecodeError as error:
        line = f"line {error.lineno:,}, " if error.lineno > 1 else ""
        return Broken(f"it is not JSON ({error.msg}, {line}character {error.colno:,})")
    except RecursionError:
        return Broken("it is nested too deeply")


def _unreadable(file: Path, line: int, error: Exception) -> DataError:
    behind = f" behind line {line:,}" if line else ""
    return DataError(f"cannot read {file}{behind}: {error}", fix=_FIX)


def first_wrong_text(files: Sequence[Path], column: str) -> str | None:
    """The place of the first row whose `column` is not text or null, and why; None where none
    is found in the first GiB.

    Raises DataError when a file cannot be read.
    """
    searched = 0
    for file in filter(is_json, files):
        for place, row in json_rows(file):
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
