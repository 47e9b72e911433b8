"""Zip files as torch.save writes them, judged before anything in them is read."""

import struct
import zipfile
from io import SEEK_END
from typing import BinaryIO

_LAST, _LOCATOR, _END = (struct.Struct(form) for form in ("<4s8xLLH", "<4s4xQ4x", "<4sQ28xQQ"))
"""The last records of a zip file: the last one, and before it two of files above 4 GiB."""


def require_plain_archive(file: BinaryIO) -> list[zipfile.ZipInfo]:
    """The entries of a file of torch 1.6 or later; it is left at its beginning.

    Raises ValueError for one that takes more memory than it has bytes, and for one of whose
    entries readers of zip files may have different views.
    """
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not a zip file of torch 1.6 or later")
    size = file.seek(0, SEEK_END)
    _require_end(file, size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed, as torch never writes it")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("its entries overlap")
    file.seek(0)
    return entries


def _require_end(file: BinaryIO, size: int) -> None:
    """Raise ValueError unless the list of entries ends where the file's last record begins, so
    that all readers of zip files take the same one."""
    file.seek(max(0, size - _LAST.size - _LOCATOR.size - _END.size))
    tail = file.read()
    mark, nbytes, start, comment = _LAST.unpack(tail[-_LAST.size :])
    position = size - _LAST.size
    if tail[-_LAST.size - _LOCATOR.size :].startswith(b"PK\6\7"):
        _, place = _LOCATOR.unpack(tail[_END.size : -_LAST.size])
        sign, length, nbytes, start = _END.unpack(tail[: _END.size])
        position -= _LOCATOR.size + _END.size
        if (sign, length, place) != (b"PK\6\6", _END.size - 12, position):
            raise ValueError("its last records contradict one another")
    if mark != b"PK\5\6" or comment or start + nbytes != position:
        raise ValueError("its list of entries is not at its end")
