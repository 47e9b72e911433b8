"""The data cache: its folder, hashes, locks and atomic writes."""

import hashlib
import json
import logging
import os
from contextlib import AbstractContextManager
from pathlib import Path

from toolkit.errors import DataError
from toolkit.recipe.places import is_remote
from toolkit.system.atomic import write_atomically
from toolkit.text.redact import redact

logger = logging.getLogger(__name__)

_MOMENT_S = 1.0


def cache_folder() -> Path:
    """Folder for tokenised data: `$DMT_CACHE`, else `~/.cache/dmt`.

    Raises DataError for a URL.
    """
    chosen = os.environ.get("DMT_CACHE")
    if chosen and is_remote(chosen):
        fix = "name a folder on this machine, or one that machines share, without a URL"
        raise DataError(f"DMT_CACHE is `{redact(chosen)}`, which is a URL", fix=fix)
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "dmt"


def fingerprint_of(value: object) -> str:
    """Hash, in hex, of a value made of strings, numbers, None, lists and dicts."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_cached(path: Path, content: str | bytes) -> None:
    """Write a file of the data cache atomically.

    Raises DataError when the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise cache_not_writable(path.parent, error) from error


def held_lock(path: Path, doing: str) -> AbstractContextManager[object]:
    """Hold the lock. A message is shown if waiting takes longer than a moment."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        return lock.acquire(timeout=_MOMENT_S)
    except Timeout:
        logger.warning("another process is %s the same data; waiting for it", doing)
        return lock.acquire()


def cache_not_writable(folder: Path, error: OSError) -> DataError:
    """The error if tokenised data cannot be stored."""
    return DataError(
        f"cannot write to the data cache {folder}: {error.strerror or error}",
        fix="name a folder with enough space in $DMT_CACHE",
    )


def unreadable(path: object, error: OSError) -> DataError:
    """The error if a data file cannot be read."""
    return DataError(
        f"cannot read {path}: {error.strerror or error}",
        fix="make the file readable, or name other files in the recipe",
    )
