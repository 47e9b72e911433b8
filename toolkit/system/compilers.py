"""Compilation at the start of a run: the required tools, and the caches."""

import os
import shlex
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no type hints of its own

from toolkit.errors import BackendUnavailable

NETWORK_SYSTEMS = ("nfs", "lustre", "gpfs", "ceph", "fuse", "beegfs", "9p", "cifs", "wekafs")
"""File systems on other machines, by the beginnings of their names."""
CPP = "C++ compiler"
HEADERS = "Python headers"


@dataclass(frozen=True)
class Missing:
    """Something that a build needs and this machine lacks."""

    name: str
    """Name of the tool."""
    what: str
    fix: str


def compiler(variable: str, usual: Sequence[str]) -> list[str]:
    """The compiler's command: the one that an environment variable names, or the first usual
    one found. Empty without one."""
    commands = [shlex.split(os.environ[variable])] if variable in os.environ else None
    for command in commands or ([one] for one in usual):
        if command and shutil.which(command[0]) is not None:
            return command
    return []


def missing_compiler(name: str, variable: str, usual: Sequence[str]) -> Iterator[Missing]:
    """Yield the compiler `name` if it is missing."""
    if compiler(variable, usual):
        return
    stated = variable in os.environ
    named = f" ({os.environ[variable]!r}, named by {variable})" if stated else ""
    yield Missing(
        name,
        f"there is no {name}{named}",
        f"unset {variable}, or install one: " * stated
        + "apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL)",
    )


def missing_headers() -> Iterator[Missing]:
    """Yield Python's headers if they are missing."""
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        yield Missing(
            HEADERS,
            f"Python's headers are missing ({headers / 'Python.h'})",
            "apt-get install python3-dev (Debian, Ubuntu), dnf install python3-devel "
            "(Fedora, RHEL)",
        )


def missing_for_torch_compile(*, on_gpu: bool) -> list[Missing]:
    """Yield what torch.compile lacks here. It writes C++ for CPUs. For GPUs it writes Triton's
    kernels, which a C compiler wraps."""
    if on_gpu:
        lacking = missing_compiler("C compiler", "CC", ("gcc", "clang", "cc"))
    else:
        lacking = missing_compiler(CPP, "CXX", ("g++",))
    return [*lacking, *missing_headers()]


def user_cache() -> Path:
    """The folder of this user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def file_system(path: Path) -> str:
    """The kind of file system that holds `path`: `ext4`, `tmpfs`, `nfs4`, … or `unknown`."""
    over = [
        one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)
    ]
    # Later mounts cover earlier ones of the same place.
    found = max(reversed(over), key=lambda one: len(Path(one.mountpoint).parts), default=None)
    return "unknown" if found is None else str(found.fstype)


def private_folder(*names: str) -> Path:
    """Create a folder under DMT's cache for code that will be executed, private to this user.

    If the home directory is on another machine, use this machine's temporary folder. Otherwise
    all nodes would write the same files. Raises BackendUnavailable where it cannot be created,
    or another user owns it or may write to it.
    """
    folders = [(user_cache() / "dmt").joinpath(*names)]
    stated = os.environ.get("XDG_CACHE_HOME")
    if not stated and file_system(Path.home().resolve()).startswith(NETWORK_SYSTEMS):
        local = Path(tempfile.gettempdir()) / f"dmt-{os.getuid()}"
        folders = [local, local.joinpath(*names)]  # all users may write around the first
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BackendUnavailable(
                f"{folder}, where compiled code is kept, cannot be created: {error.strerror}",
                fix="set XDG_CACHE_HOME to a folder that you can write to",
            ) from error
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise BackendUnavailable(
                f"{folder}, where compiled code is kept, belongs to another user, or others "
                "may write to it",
                fix=f"chmod go-w {folder}, or set XDG_CACHE_HOME to a folder of your own",
            )
    return folders[-1]
