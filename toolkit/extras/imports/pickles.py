"""Reads files that torch.save wrote, without running code from them.

torch's unpickler for weights makes tensors, plain containers and the classes that it is given:
here inert stand-ins for the few plain classes of a format, so that the tool's own code is never
imported. It would also call constructors that reserve memory, so every name in a pickle is
compared with a shorter list first. Only zip files without compression are read, as torch has
written them since 1.6, and they are mapped: a file takes no more memory than it has bytes.
"""

import pickletools
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import CheckpointError
from toolkit.extras.convert.archives import require_plain_archive
from toolkit.system.untrusted import regular_inside

_PLAIN = re.compile(
    r"collections\.OrderedDict|torch\.(Size|\w+Storage|storage\.UntypedStorage)"
    r"|torch\.(Tensor|_tensor\._rebuild_from_type_v2|_utils\._rebuild_(tensor_v2|parameter))"
    r"|torch\.device|_codecs\.encode|__builtin__\.(set|complex)"
)
"""Names in a pickle of tensors and plain containers."""
_OPCODES = frozenset(
    """PROTO STOP MARK GLOBAL REDUCE NEWOBJ BUILD BINPERSID NONE NEWTRUE NEWFALSE EMPTY_DICT
    EMPTY_LIST EMPTY_TUPLE EMPTY_SET TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS
    BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING BINPUT LONG_BINPUT BINGET
    LONG_BINGET""".split()  # noqa: SIM905 - a list of lines is not easier to read
)
"""Opcodes of the pickle protocol that torch.save uses."""
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
"""Of arguments and random states that training scripts save; nothing here reads them."""


class StandIn:
    """An object of a class that is not imported: its arguments and attributes, and nothing
    else."""

    def __init__(self, *arguments: object) -> None:
        self.arguments: tuple[Any, ...] = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def load_pickle(folder: Path, name: str, classes: Iterable[str] = ()) -> Any:
    """What `torch.save` wrote into a file of `folder`; tensors are mapped, not read.

    Objects of `classes` (`module.Class`) are `StandIn`s. Raises CheckpointError for anything
    else than these, tensors and plain containers, and for a link or a special file.
    """
    path, allowed = folder / name, (*COMMON_CLASSES, *classes)
    try:
        _check(regular_inside(folder, name), allowed)
        with _standing_in(allowed):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_strides(content)
        return content
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} is refused: {why[:200]}",
            fix="it is damaged, or holds objects that no checkpoint of this format needs",
        ) from error


@contextmanager
def _standing_in(classes: Iterable[str]) -> Iterator[None]:
    """torch's weights-only loader takes these classes as `StandIn`s, and no others: libraries
    add some of their own, megatron-core `argparse.Namespace`."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals([(StandIn, one) for one in classes]):
            yield
    finally:
        torch.serialization.add_safe_globals(added)


def _check(path: Path, allowed: Collection[str]) -> None:
    """Raise ValueError unless it is one of torch's zip files, whose content is not compressed,
    and names nothing but `allowed` classes and those of tensors."""
    with path.open("rb") as file:
        entries = require_plain_archive(file)
    if sum(entry.filename.endswith("data.pkl") for entry in entries) != 1:
        raise ValueError("it does not hold one pickle")
    # torch's own reader: it may find another one than Python's, and it accepts files that
    # were written without checksums.
    content = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in _OPCODES:
            raise ValueError(f"it has the opcode {opcode.name}, which torch.save never writes")
        full = str(argument).replace(" ", ".")
        if opcode.name == "GLOBAL" and not _is_harmless(full, allowed):
            raise ValueError(f"it names {full}, which no checkpoint needs")


def _check_strides(content: Any) -> None:
    """Raise ValueError for a tensor with more elements than are stored: a copy of it would take
    more memory than the file has bytes."""
    seen: set[int] = set()
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise ValueError("it has a tensor with more elements than are stored")
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, StandIn):
            waiting.append(vars(value))


def _is_harmless(name: str, allowed: Collection[str]) -> bool:
    return name in allowed or _PLAIN.fullmatch(name) is not None or _is_dtype(name)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)
