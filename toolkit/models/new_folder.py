"""New folders of a conversion or export: they appear under their names when they are complete.
Before that, they are hidden folders next to them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import DataError


def check_destination(src: Path, dst: Path, nbytes: int) -> None:
    """Refuse an output folder that cannot be created or has not enough space. Raises
    DataError."""
    parent = next(above for above in dst.absolute().parents if os.path.lexists(above))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise DataError(f"{dst} cannot be created: {parent} is not a writable folder")
    if os.path.lexists(dst) and (not os.access(dst, os.R_OK) or not _is_empty(dst)):
        raise DataError(f"{dst} exists and is no empty folder", fix="name a new folder")
    if dst.resolve().is_relative_to(src.resolve()):
        raise DataError(f"{dst} lies inside {src}", fix="name a folder outside")
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise DataError(
            f"{parent} has {free / 1e9:.1f} GB free, {dst.name} needs {nbytes / 1e9:.1f} GB",
            fix="free space or name a folder on another disk",
        )


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())


@contextmanager
def appearing(dst: Path) -> Iterator[Path]:
    """A hidden folder next to `dst` that gets its name at the end, or is removed on failure.

    Raises DataError when reading or writing a file fails on the way.
    """
    dst = dst.absolute()
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=f".{dst.name}.partial-", dir=dst.parent))
        try:
            hidden.chmod(0o755)
            yield hidden
            hidden.rename(dst)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except OSError as error:
        raise DataError(f"writing {dst} failed, nothing of it is left: {error}") from error
