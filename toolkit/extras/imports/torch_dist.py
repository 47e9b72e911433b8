"""Reads the index of `torch.distributed.checkpoint` folders: their `.metadata` file.

torch's own reader, which megatron-core calls, would unpickle any object in it.
"""

import io
import pickle
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from toolkit.extras.imports.pickles import refused
from toolkit.system.untrusted import read_bytes

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"
"""Which megatron-core writes in addition."""
LARGEST_INDEX_BYTES = 1 << 30


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and type of every tensor in a checkpoint, by its key. Raises CheckpointError for a
    damaged or malicious index."""
    path = folder / METADATA
    with refused(path):
        index = _IndexUnpickler(io.BytesIO(read_bytes(path, LARGEST_INDEX_BYTES))).load()
        if not isinstance(index, Metadata):
            raise TypeError("it is not the index of a checkpoint")
    entries = index.state_dict_metadata.items()
    return {key: one for key, one in entries if isinstance(one, TensorStorageMetadata)}


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
