"""megatron-core's `torch_dist` checkpoint format, written and read one rectangle at a time.

A checkpoint is a folder of data files and a `.metadata` file with the byte offset of every
rectangle of every global tensor. Ranks of any layout read what they need from it, because a
global tensor does not depend on the layout that wrote it. torch's own writer holds tensors
until a file is complete, so here the bytes are written directly; the format is that of
`torch.distributed.checkpoint` (torch 2.10 and later) with the three small files that
`megatron.core.dist_checkpointing` adds (0.15 and later).
"""

import io
import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from toolkit.errors import CheckpointError
from toolkit.extras.convert.archives import require_plain_archive
from toolkit.models.sliced_file import SlicedFile
from toolkit.system.untrusted import read_bytes

METADATA = ".metadata"
DATA_FILE = "__0_0.distcp"
FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
LARGEST_INDEX_BYTES = 1 << 30
CACHE_BYTES = 128 << 20
"""Rectangles cached by a reader: the parts of a fused tensor are requested one after
another."""


class Writer:
    """Writes a checkpoint folder, which is valid only after `finish`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._file = SlicedFile(folder / DATA_FILE)
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> Self:
        # torch's readers ignore the checksums, which take twice as long as writing.
        self._checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        return self

    def __exit__(self, *_: object) -> None:
        torch.serialization.set_crc32_options(self._checksums)
        self._file.close()

    def add(self, key: str, size: Sequence[int], offset: Sequence[int], part: Tensor) -> None:
        """Write `part` as the rectangle at `offset` of the global tensor `key` of `size`.

        All rectangles of a tensor have its number of dimensions, and one dtype.
        """
        entry = self._tensors.setdefault(
            key,
            TensorStorageMetadata(TensorProperties(part.dtype), torch.Size(size), []),
        )
        assert isinstance(entry, TensorStorageMetadata)
        if entry.properties.dtype != part.dtype:
            raise CheckpointError(
                f"{key} would hold both {entry.properties.dtype} and {part.dtype}; a Megatron "
                "tensor has one dtype",
                fix="convert the model to one dtype first",
            )
        chunk = ChunkStorageMetadata(torch.Size(offset), part.shape)
        index = MetadataIndex(key, chunk.offsets, len(entry.chunks))
        entry.chunks.append(chunk)
        # Saving a view would save its whole storage.
        owned = part.numel() == part.untyped_storage().nbytes() // part.element_size()
        self._write(
            index, part if owned and part.is_contiguous() else part.clone().contiguous()
        )

    def add_empty_object(self, key: str) -> None:
        """Write the object that a module without extra state saves."""
        self._tensors[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key), [None])

    def _write(self, index: MetadataIndex, value: object) -> None:
        start = self._file.tell()
        _save(value, self._file)
        self._storage[index] = _StorageInfo(DATA_FILE, start, self._file.tell() - start)

    def finish(self, common: Mapping[str, Any]) -> None:
        """Write the index; `common` is the plain state that is the same on all ranks."""
        os.fsync(self._file.fileno())
        with SlicedFile(self.folder / COMMON_FILE) as file:
            _save(dict(common), file)
        (self.folder / FORMAT_FILE).write_text(json.dumps(FORMAT))
        metadata = Metadata(self._tensors, storage_data=self._storage)
        (self.folder / METADATA).write_bytes(pickle.dumps(metadata))


def _save(value: object, file: SlicedFile) -> None:
    try:
        torch.save(value, file)
    except RuntimeError as error:
        # torch's writer hides errors of the file, such as a full disk.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor of a checkpoint, whole."""

    size: tuple[int, ...]
    dtype: torch.dtype


class Reader:
    """Reads rectangles of global tensors from a checkpoint that any layout saved.

    Raises CheckpointError for a folder that is not such a checkpoint or was tampered with.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = _load_index(folder)
        self.tensors = index.tensors
        self._chunks = index.chunks
        self._places = index.places
        self.objects = {
            key for key, offset in index.places if not offset
        } - index.tensors.keys()
        """Keys of what is no tensor, see `read_object`."""
        self._cache: OrderedDict[tuple[str, tuple[int, ...]], Tensor] = OrderedDict()

    def read(self, key: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """The rectangle at `offset` of `size`, in as many dimensions as the tensor has.

        It may be a view of the reader's cache: do not write to it.
        """
        whole = self.tensors[key]
        result = torch.empty(tuple(size), dtype=whole.dtype)
        filled = 0
        for chunk in self._chunks[key]:
            overlap = [
                (max(a, c), min(a + n, c + m))
                for a, n, c, m in zip(offset, size, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(low >= high for low, high in overlap):
                continue
            target = tuple(
                slice(x - a, y - a) for (x, y), a in zip(overlap, offset, strict=True)
            )
            source = tuple(
                slice(x - c, y - c) for (x, y), c in zip(overlap, chunk.offsets, strict=True)
            )
            part = self._chunk(key, chunk)[source]
            if part.numel() == result.numel():
                return part
            result[target] = part
            filled += part.numel()
        if filled != result.numel():
            raise CheckpointError(f"{self.folder}: parts of {key} are missing")
        return result

    def stored_sizes(self, key: str) -> list[tuple[int, ...]]:
        """The sizes of the rectangles in which the tensor is stored, in no fixed order."""
        return [tuple(chunk.sizes) for chunk in self._chunks[key]]

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A stored rectangle; the last ones are kept."""
        name = key, tuple(chunk.offsets)
        if name not in self._cache:
            self._cache[name] = self._load(name, chunk)
            while sum(part.nbytes for part in self._cache.values()) > CACHE_BYTES:
                if len(self._cache) == 1:
                    break
                self._cache.popitem(last=False)
        self._cache.move_to_end(name)
        return self._cache[name]

    def _load(self, name: tuple[str, tuple[int, ...]], chunk: ChunkStorageMetadata) -> Tensor:
        stored = io.BytesIO(self._stored(*name))
        try:
            require_plain_archive(stored)
            part = torch.load(stored, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{self.folder}: {name[0]} cannot be read ({type(error).__name__})"
            ) from error
        expected = torch.Size(chunk.sizes), self.tensors[name[0]].dtype
        if not isinstance(part, Tensor) or (part.shape, part.dtype) != expected:
            raise CheckpointError(f"{self.folder}: {name[0]} is not what the index says")
        if part.untyped_storage().nbytes() > part.nbytes:
            raise CheckpointError(f"{self.folder}: {name[0]} is a view of something larger")
        return part

    def read_object(self, key: str) -> bytes:
        """What torch.save wrote of an object, to be unpickled with care."""
        return self._stored(key, ())

    def _stored(self, key: str, offset: tuple[int, ...]) -> bytes:
        place = self._places.get((key, offset))
        if place is None:
            raise CheckpointError(f"{self.folder}: no place is given for {key}")
        path = self.folder / place.relative_path
        try:
            if not path.is_file():
                raise FileNotFoundError(path)  # also for a FIFO, which would never end
            with path.open("rb") as file:
                file.seek(place.offset)
                return file.read(min(place.length, path.stat().st_size))
        except OSError as error:
            raise CheckpointError(
                f"{path}: {key} cannot be read ({type(error).__name__})"
            ) from error


# --- the index --------------------------------------------------------------------------

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""Classes of an index, by module. Any other class could run code."""


_CHECKED: Mapping[bytes, Callable[[list[Any]], bool]] = {
    pickle.SETITEM: lambda stack: _is_key(stack[-2]),
    pickle.SETITEMS: lambda stack: all(map(_is_key, stack[::2])),
    pickle.REDUCE: lambda stack: _is_plain(stack[-1]),
    pickle.NEWOBJ: lambda stack: _is_plain(stack[-1]),
    pickle.BUILD: lambda stack: _may_be_built(*stack[-2:]),
}
"""Opcodes that hash, call or change an object, and their preconditions on the stack.

Hashing a tuple of tuples that share their elements takes time that doubles with each level.
"""
_UNCHECKED = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE,
    pickle.NEWFALSE, pickle.BINFLOAT, pickle.BININT, pickle.BININT1, pickle.BININT2,
    pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.GLOBAL,
    pickle.STACK_GLOBAL, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2,
    pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT,
    pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
)  # fmt: skip
"""The other opcodes of an index; each takes as much memory as the file has bytes for it."""


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickles the classes of an index and torch's dtypes, nothing else.

    Python's own unpickler: the one in C takes as much memory as the largest memo index in the
    file says.
    """

    class _Dispatch(dict[int, Callable[[Any], None]]):
        def __missing__(self, code: int) -> Any:
            raise pickle.UnpicklingError(f"it has the opcode {code:#04x}, which no index needs")

    dispatch = _Dispatch({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _UNCHECKED})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return _path  # where it was saved, if that was named by a Path
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


def _checked(opcode: bytes) -> Callable[[Any], None]:
    """Execute an opcode of `_CHECKED`."""

    def carry_out(self: Any) -> None:
        if not _CHECKED[opcode](self.stack):
            raise pickle.UnpicklingError("it builds what no index holds")
        pickle._Unpickler.dispatch[opcode[0]](self)

    return carry_out


_MetadataUnpickler.dispatch |= {code[0]: _checked(code) for code in _CHECKED}


def _is_key(key: object) -> bool:
    if isinstance(key, MetadataIndex):
        return isinstance(key.fqn, str) and _is_plain((key.offset, key.index))
    return isinstance(key, str | int)


def _is_plain(arguments: object) -> bool:
    """Whether these are scalars, or flat sequences of integers."""
    return isinstance(arguments, tuple) and all(
        all(type(number) is int for number in value)
        if isinstance(value, tuple | list)
        else value is None or isinstance(value, str | int | type)
        for value in arguments
    )


def _may_be_built(instance: object, state: object) -> bool:
    """Whether this object was created by the file and is not a Python singleton."""
    if not is_dataclass(instance) or isinstance(instance, type | Enum):
        return False
    if not isinstance(state, dict):
        return isinstance(instance, TensorProperties)
    return all(isinstance(name, str) and not name.startswith("__") for name in state)


def _path(*parts: str) -> str:
    """What a path becomes; `_is_plain` has looked at its parts."""
    return "/".join(map(str, parts))


def _member(enumeration: Any, name: str) -> Enum:
    """What `getattr` may get: Python 3.11.0 to 3.11.3 pickle the member of an Enum so."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum)):
        raise pickle.UnpicklingError("it names getattr, which no index needs but for an Enum")
    return enumeration[name]


@dataclass(frozen=True)
class _Index:
    """The content of `.metadata`, checked to have the supported format."""

    tensors: dict[str, GlobalTensor]
    chunks: dict[str, list[ChunkStorageMetadata]]
    places: dict[tuple[str, tuple[int, ...]], _StorageInfo]
    """Where a chunk lies, by the key of its tensor and its offset."""


def _load_index(folder: Path) -> _Index:
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no torch_dist checkpoint: it has no {METADATA}",
            fix="name the folder that holds the *.distcp files, or the one above it with "
            "latest_checkpointed_iteration.txt",
        )
    try:
        content = read_bytes(path, LARGEST_INDEX_BYTES)
        return _checked_index(_MetadataUnpickler(io.BytesIO(content)).load())
    except Exception as error:
        what = str(error) or type(error).__name__
        raise CheckpointError(f"{path} is refused: {what}") from error


def _checked_index(metadata: object) -> _Index:
    """Raises ValueError, or whatever reading a value of the wrong type raises."""
    if not isinstance(metadata, Metadata):
        raise ValueError("it is not the index of a checkpoint")
    index = _Index({}, {}, {})
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str):
            raise ValueError(f"it names a tensor by a {type(key).__name__}")
        if not isinstance(entry, TensorStorageMetadata):
            continue
        size, dtype = _whole_numbers(entry.size), entry.properties.dtype
        chunks = [
            ChunkStorageMetadata(
                torch.Size(_whole_numbers(chunk.offsets)),
                torch.Size(_whole_numbers(chunk.sizes)),
            )
            for chunk in entry.chunks
        ]
        ranks = {len(size)}.union(*({len(c.offsets), len(c.sizes)} for c in chunks))
        if not isinstance(dtype, torch.dtype) or len(ranks) > 1:
            raise ValueError(f"it contradicts itself about {key!r:.80}")
        index.tensors[key] = GlobalTensor(size, dtype)
        index.chunks[key] = chunks
    for where, place in metadata.storage_data.items():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(
                f"it names a file outside its folder: {place.relative_path[:80]!r}"
            )
        _whole_numbers((place.offset, place.length))
        if not isinstance(where.fqn, str):
            raise ValueError(f"it names a tensor by a {type(where.fqn).__name__}")
        index.places[where.fqn, _whole_numbers(where.offset or ())] = place
    return index


def _whole_numbers(values: Sequence[object]) -> tuple[int, ...]:
    """A size or an offset. Raises ValueError otherwise."""
    numbers = tuple(value for value in values if type(value) is int and 0 <= value < 1 << 62)
    if len(numbers) != len(values):
        raise ValueError(f"it holds a {type(values).__name__} of something else for a size")
    return numbers
