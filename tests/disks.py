"""A small file system, for tests of what happens when it is full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import needs


@contextmanager
def small_file_system(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of `size_bytes` at the new `folder`; skip where that is forbidden."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    needs.require(needs.ROOT)
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        needs.unmet(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_room(folder: Path, size_bytes: int) -> None:
    """Let the mounted file system grow."""
    option = f"remount,size={size_bytes}"
    subprocess.run(["mount", "-o", option, str(folder)], check=True)
