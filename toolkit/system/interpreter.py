"""How DMT starts Python: without the working directory on the path, and quickly.

`python -m` puts the working directory first on `sys.path`, so that a folder `toolkit/` or a
file `random.py` there would be imported instead of ours or the standard library's.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import toolkit

_CHECKOUT = Path(toolkit.__file__).parents[1]
_SCRIPT = "launch/train.py"
TRAIN = _SCRIPT if (_CHECKOUT / _SCRIPT).is_file() else "-m toolkit.train"
"""The command that another launcher starts on each rank, before RECIPE. A wheel has no
`launch/`."""


def safe_path() -> bool:
    """Whether new processes leave the working directory out. False only if DMT itself is
    imported from there, from a checkout that is not installed."""
    return Path.cwd() != _CHECKOUT


def python() -> tuple[str, ...]:
    """The interpreter, to be followed by `-m MODULE`."""
    return (sys.executable, *SAFE) if safe_path() else (sys.executable,)


def program(name: str) -> str | None:
    """The path of a program: next to this Python, else on PATH. None if it is missing."""
    neighbour = Path(sys.executable).with_name(name)
    return str(neighbour) if neighbour.is_file() else which(name)


SAFE = ("-P",)
"""Python's option that leaves the working directory out. PYTHONSAFEPATH=1 does the same."""


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries without looking for garbage among their thousands of classes.

    A fifth of what a rank's imports take. Later collections skip what is imported here, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Inside this block, importing `package` fails, unless it is already imported."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # as the import system documents
    try:
        yield
    finally:
        del sys.modules[package]
