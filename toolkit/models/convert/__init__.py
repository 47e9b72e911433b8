"""Between a Hugging Face folder and a Megatron checkpoint, in both directions.

A piece of one tensor is in memory at a time. The Megatron side is megatron-core's `torch_dist`
format, whose tensors are whole: one checkpoint serves every TP, PP and EP. What the Megatron
side has no place for (config, tokenizer, names of tensors) is kept beside it in `hf/`, so that
the way back restores the folder.

The result appears under its name when it is complete; before that it is a hidden folder
beside it.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import DataError

__all__ = ["appearing", "check_destination"]


def check_destination(src: Path, dst: Path, nbytes: int) -> None:
    """Refuse a folder that holds something, or a disk without room. Raises DataError."""
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise DataError(f"{dst} exists and is not empty", fix="name a new folder")
    if dst.resolve().is_relative_to(src.resolve()):
        raise DataError(f"{dst} lies inside {src}", fix="name a folder outside")
    parent = next(folder for folder in dst.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise DataError(
            f"{parent} has {free / 1e9:.1f} GB free, {dst.name} needs {nbytes / 1e9:.1f} GB",
            fix="free space or name a folder on another disk",
        )


@contextmanager
def appearing(dst: Path) -> Iterator[Path]:
    """A hidden folder beside `dst` that takes its name at the end, or goes when that fails."""
    dst = dst.absolute()
    dst.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{dst.name}.partial-", dir=dst.parent))
    try:
        hidden.chmod(0o755)
        yield hidden
        hidden.rename(dst)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
