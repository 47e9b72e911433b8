"""Reads `torch.distributed.checkpoint` folders.

A checkpoint is a folder of data files and a `.metadata` file. That file has the byte offset of
every rectangle of every global tensor. torch's own reader would unpickle any object in it.
"""

import io
import pickle
from enum import Enum
from operator import add, sub
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from toolkit.errors import CheckpointError
from toolkit.extras.imports.pickles import refused, unpickled
from toolkit.system.untrusted import read_bytes, regular_inside

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"
"""Which megatron-core writes in addition."""
LARGEST_INDEX_BYTES = 1 << 30


class Reader:
    """Reads tensors from a checkpoint that any layout saved.

    Raises CheckpointError for a folder that is not such a checkpoint, or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = _load_index(folder)
        self.tensors = {
            key: entry
            for key, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._places = {
            (where.fqn, tuple(where.offset or ())): place
            for where, place in index.storage_data.items()
        }
        self.objects = {key for key, offset in self._places if not offset} - self.tensors.keys()
        """Keys of entries that are no tensors, see `read_object`."""

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """A whole tensor, or the one at `index` in its first dimensions."""
        entry, outer = self.tensors[key], len(index)
        result, filled = torch.empty(entry.size[outer:], dtype=entry.properties.dtype), 0
        for chunk in entry.chunks:
            starts, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            inside = tuple(map(sub, index, starts))
            if not all(0 <= number < size for number, size in zip(inside, sizes, strict=False)):
                continue
            part = self.read_object(key, starts)
            if not isinstance(part, Tensor) or (part.shape, part.dtype) != (
                sizes,
                result.dtype,
            ):
                raise CheckpointError(f"{self.folder}: {key} is not what the index says")
            place = tuple(map(slice, starts, map(add, starts, sizes)))[outer:]
            if result[place].shape != part[inside].shape:
                raise CheckpointError(f"{self.folder}: {key} is larger than the index says")
            result[place] = part[inside]
            filled += part[inside].numel()
        if filled != result.numel():
            raise CheckpointError(f"{self.folder}: parts of {key} are missing")
        return result

    def read_object(self, key: str, offset: tuple[int, ...] = ()) -> Any:
        """Unpickle an object, or the part of a tensor at `offset`, that torch.save wrote."""
        with refused(f"{self.folder}: {key}"):
            place = self._places[key, offset]
            path = regular_inside(self.folder, Path(place.relative_path).name)
            with path.open("rb") as file:
                file.seek(place.offset)
                return unpickled(io.BytesIO(file.read(min(place.length, path.stat().st_size))))


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
    """What `getattr` may return: an Enum's member, which Python 3.11.0 to 3.11.3 pickle so."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum)):
        raise pickle.UnpicklingError("it names getattr, which no index needs but for an Enum")
    return enumeration[name]


def _load_index(folder: Path) -> Metadata:
    path = folder / METADATA
    with refused(path):
        index = _IndexUnpickler(io.BytesIO(read_bytes(path, LARGEST_INDEX_BYTES))).load()
        if not isinstance(index, Metadata):
            raise TypeError("it is not the index of a checkpoint")
        return index
