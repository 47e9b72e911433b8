"""Which file of a checkpoint holds which rectangle of which tensor.

`index.json` has a text for every quantity of every tensor: its rectangles, each after the
number in its file's name, as in `00000[0:32,0:64] 00001[32:64,0:64]`. A rank opens only the
files that it needs. Checkpoints of 0.1 have no index. It is made of the headers of all files.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from toolkit.checkpoint.manifest import FileRecord, Manifest, file_in, write_synced
from toolkit.errors import CheckpointError
from toolkit.system.untrusted import parse_json, read_bytes

INDEX = "index.json"
DAMAGED = "`dmt checkpoint verify` names what is wrong with it"
_LARGEST_BYTES = 1 << 32
_STATE_FILE = re.compile(r"state-(\w+)\.safetensors")
_KEY = re.compile(r"(\w+/\S+)(\[[\d:,]+\])")


def write_index(folder: Path, names: Iterable[str]) -> FileRecord:
    """Write the index of these files, to disk. Raises CheckpointError or OSError."""
    return write_synced(folder / INDEX, json.dumps(index_of(folder, names)).encode())


def read_index(folder: Path) -> dict[str, str]:
    """Quantity and tensor, as `weight/model.norm.weight`, → their rectangles.

    Raises CheckpointError.
    """
    files = Manifest.read(folder).files
    if INDEX not in files:
        return index_of(folder, files)
    path = file_in(folder, INDEX)
    try:
        index = parse_json(read_bytes(path, _LARGEST_BYTES))
        if not isinstance(index, dict) or {*map(type, index.values())} - {str}:
            raise ValueError("it is not a table of texts")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", fix=DAMAGED) from error
    return index


def index_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The index of the state files among these. Raises CheckpointError."""
    index: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        if (file := _STATE_FILE.fullmatch(name)) is None:
            continue
        path = file_in(folder, name)
        try:
            with safe_open(path, "pt") as tensors:
                keys = tensors.keys()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", fix=DAMAGED) from error
        for key in keys:
            if (parts := _KEY.fullmatch(key)) is None:
                raise CheckpointError(f"{path} holds {key}, which is no part of a state")
            index[parts[1]].append(file[1] + parts[2])
    return {tensor: " ".join(rectangles) for tensor, rectangles in index.items()}
