"""Reads `torch.distributed.checkpoint` folders, one rectangle at a time.

A checkpoint is a folder of data files and a `.metadata` file with the byte offset of every
rectangle of every global tensor. torch's own reader unpickles that file whatever it holds.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from toolkit.errors import CheckpointError
from toolkit.system.untrusted import read_bytes

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"
"""Which megatron-core writes in addition."""
LARGEST_INDEX_BYTES = 1 << 30
CACHE_BYTES = 128 << 20
"""Rectangles cached by a reader: the parts of a fused tensor are requested one after
another."""


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

_CLASSES = {
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


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles the classes of an index and torch's dtypes, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePosixPath  # where it was saved, if that was named by a Path
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


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
        return _checked_index(_IndexUnpickler(io.BytesIO(content)).load())
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
