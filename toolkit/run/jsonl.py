"""Append-only JSON Lines files that survive a kill at any moment.

JSON has no NaN or infinity. They are written as the strings "NaN", "Infinity" and
"-Infinity" (the convention of Protocol Buffers' JSON mapping): every JSON parser reads
the line, and `float()` turns the string back into the number.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.system.atomic import write_atomically
from toolkit.system.untrusted import parse_json, read_bytes
from toolkit.text.redact import redact
from toolkit.text.terminal import tell

LARGEST = 1 << 33
"""Bytes of a file that are read."""


def plain(value: Any, text: Callable[[str], str] = str) -> Any:
    """Return `value` with non-finite numbers as strings, texts as `text` of them returns, and
    secrets masked in those."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return redact(text(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, text) for item in value]
    return value


def document(value: Mapping[str, Any]) -> str:
    """A file with one object: indented JSON that ends in a newline, without secrets."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n"


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line with a single write, so that writers do not cut each other's lines.

    A last line that a kill cut is ended first, never removed: another process may write it.
    Raises OSError when the disk is full. Nothing of the line is left then.
    """
    text = json.dumps(plain(record), allow_nan=False, ensure_ascii=False) + "\n"
    line = text.encode(errors="backslashreplace")  # names of files that are not UTF-8
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if (written := os.write(descriptor, line)) < len(line):
            if os.fstat(descriptor).st_size == size + written:  # nobody wrote after it
                os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, "line cut short, is the disk full?", str(path))
    finally:
        os.close(descriptor)


_failed: set[Path] = set()
"""Files to which this process could not append."""


def append_where_room(path: Path, record: Mapping[str, Any]) -> None:
    """As `append`, but a full disk costs the line, not the run. Rank 0 reports the first
    failure on a file on standard error."""
    try:
        append(path, record)
    except OSError as error:
        if path not in _failed and os.environ.get("RANK", "0") == "0":
            tell(f"warning: {path} could not be written, lines will be missing there: {error}")
        _failed.add(path)


def read(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """Return the complete objects from byte `offset` on. None when there is no file. Raises
    OSError for what is not a regular file."""
    if not path.exists():
        return []
    return list(parse(read_bytes(path, LARGEST, offset)))


def parse(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the object of every complete line. Partial or invalid lines are skipped."""
    for line in data.split(b"\n"):
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def drop_later_steps(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the lines of steps after `step`, and partial ones. Return the lines of these
    steps."""
    if not path.exists():
        return []
    records = read(path)
    kept = [record for record in records if _step(record) <= step]
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in kept]
    write_atomically(path, "".join(lines))
    return [record for record in records if _step(record) > step]


def _step(record: Mapping[str, Any]) -> float:
    """Infinite, which is dropped, for one that is not a number."""
    found = record.get("step", 0)
    return found if isinstance(found, int | float) and found == found else math.inf
