"""A small file system, for tests of what happens when it is full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of `size_bytes` at the new `folder`; skip where that is forbidden."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if mounted.returncode:
        pytest.skip(f"only root may mount a file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_room(folder: Path, size_bytes: int) -> None:
    """Let the mounted file system grow."""
    option = f"remount,size={size_bytes}"
    subprocess.run(["mount", "-o", option, str(folder)], check=True)
