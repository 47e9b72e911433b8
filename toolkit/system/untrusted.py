"""Read untrusted files: only regular files, up to a size, and JSON up to a depth.

A FIFO never ends. A link may point anywhere. Deep nesting exhausts the stack. Callers only need
to catch OSError and ValueError.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_DEPTH = 64
"""Deepest nesting accepted. Configs, indices and manifests have less than ten levels."""
MAX_BYTES = 1 << 28
"""Larger files of settings and names are refused unread."""


def read_bytes(path: Path, limit: int = MAX_BYTES, offset: int = 0) -> bytes:
    """Read a file from byte `offset` to its end, at most `limit` bytes. Raises OSError, or
    ValueError for a longer file."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        file.seek(offset)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has {status.st_size} bytes, more than {limit} bytes")
    return data


def read_json(path: Path, limit: int = MAX_BYTES) -> Any:
    return parse_json(read_bytes(path, limit).decode("utf-8"))


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON text. `options` go to `json.loads`. Raises ValueError, also for nesting that
    is too deep."""
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise _TOO_DEEP from None
    opening = "[{" if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) <= MAX_DEPTH:  # type: ignore[arg-type]
        return value  # as most are: looking into it would take longer than parsing
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return value
    raise _TOO_DEEP


def parse_mapping(text: str | bytes) -> dict[str, Any]:
    """The names and values in JSON text. Raises ValueError for anything else."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError("not a mapping of names to values")
    return value


_TOO_DEEP = ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def regular_inside(folder: Path, name: str) -> Path:
    """Resolve the path of a file in `folder`. The folder may be a link, but nothing inside it.

    Raises OSError if the file is missing, not regular, or reached through a link.
    """
    path = folder / name
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if Path(os.path.realpath(path)) != Path(os.path.realpath(folder)) / name:
        raise OSError(errno.ELOOP, "a link leads to it", str(path))
    return path
