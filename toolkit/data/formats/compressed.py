"""Compressed files, which are read as what they hold."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from toolkit.data.formats.files import ListedFile
from toolkit.errors import BackendUnavailable

_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open,
}  # fmt: skip
_ENDINGS = (*_OPENERS, ".zst")
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


def is_compressed(path: Path) -> bool:
    """Whether the name has such an ending."""
    return path.suffix in _ENDINGS


def plain_ending(path: Path) -> str:
    """The ending of a file's name, without that of a compression."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix


@contextmanager
def opened(file: ListedFile) -> Iterator[Any]:
    """The bytes of a file, not compressed. Raises BackendUnavailable where a package is
    missing."""
    opener = opener_of(file.path.suffix, file)
    with file.open() as stream:
        if opener is None:
            yield stream
            return
        with BufferedReader(opener(stream, "rb")) as plain:
            yield plain


def opener_of(ending: str, what: object) -> Callable[..., Any] | None:
    """How files of the ending are opened; None for those that are not compressed.

    Raises BackendUnavailable, naming `what` is to be read, where a package is missing.
    """
    if ending != ".zst":
        return _OPENERS.get(ending)
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
        return _UNREADABLE
    return (*_UNREADABLE, ZstdError)
