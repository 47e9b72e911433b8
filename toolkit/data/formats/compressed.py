"""Compressed files, which are read as what they hold."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from toolkit.data.formats.files import ListedFile
from toolkit.errors import BackendUnavailable

_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open,
}  # fmt: skip
_ENDINGS = (*_OPENERS, ".zst")
_LEAST_BYTES, _MOST_BYTES = 2**8, 2**12
"""Of a zstandard file that are decompressed at once: a byte may stand for 32 KiB."""
_DENSE_BYTES = 2**20
"""Of content, after which fewer are."""
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
    decompressor = zstandard.ZstdDecompressor()
    return lambda stream, _: _Zstandard(stream, decompressor)


class _Zstandard(RawIOBase):
    """The content of all frames. Unlike `zstandard.open`, it raises EOFError where a file ends
    inside a frame."""

    def __init__(self, stream: Any, decompressor: Any) -> None:
        self._stream, self._decompressor = stream, decompressor
        self._frame: Any = None
        self._size = _LEAST_BYTES
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        """As every stream that is read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        while not self._output:
            self._input = self._input or self._stream.read(self._size)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstandard frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            output, self._input = self._frame.decompress(self._input), b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
            dense = len(output) > _DENSE_BYTES
            self._size = _LEAST_BYTES if dense else min(2 * self._size, _MOST_BYTES)
            self._output = memoryview(output)
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


def undecodable() -> tuple[type[Exception], ...]:
    """Exceptions of reading compressed files."""
    try:
        from zstandard import ZstdError
    except ImportError:
        return _UNREADABLE
    return (*_UNREADABLE, ZstdError)
