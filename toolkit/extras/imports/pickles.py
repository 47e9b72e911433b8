"""Reads files that torch.save wrote, without running code from them.

torch's unpickler for weights makes tensors, plain containers and the classes that it is given:
here inert stand-ins for the few plain classes of a format, so that the tool's own code is never
imported. Files are mapped.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import CheckpointError
from toolkit.system.untrusted import regular_inside

COMMON_CLASSES = (
    "argparse.Namespace",
    "__builtin__.getattr",  # Python 3.11.2 writes a member of an enum as a call of it
    "builtins.getattr",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
)
"""Classes of arguments and random states that scripts save. Nothing here reads them."""


class StandIn:
    """An object whose class is not imported: its arguments and attributes, and nothing else."""

    def __init__(self, *arguments: object) -> None:
        self.arguments: tuple[Any, ...] = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def load_pickle(folder: Path, name: str, classes: Iterable[str] = ()) -> Any:
    """Load what `torch.save` wrote into a file of `folder`. Tensors are mapped, not read.

    Objects of `classes` (`module.Class`) become `StandIn`s. Other objects are allowed only if
    they are tensors or plain containers. Raises CheckpointError for anything else, and for a
    link or a special file.
    """
    with refused(folder / name):
        path = regular_inside(folder, name)
        return unpickled(path, classes, mmap=True)


def unpickled(file: Any, classes: Iterable[str] = (), **options: Any) -> Any:
    """Load what `torch.save` wrote into a path or open file. Raises what torch raises."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # libraries add some, as `argparse.Namespace`
    try:
        allowed: list[Any] = [(StandIn, one) for one in (*COMMON_CLASSES, *classes)]
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True, **options)
    finally:
        torch.serialization.add_safe_globals(added)


@contextmanager
def refused(what: object) -> Iterator[None]:
    """Raise CheckpointError about `what` if reading it raises any error."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{what} is missing") from error
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{what} is refused: {why[:200]}",
            fix="it is damaged, or holds objects that no checkpoint of this format needs",
        ) from error
