"""Safetensors files tensor by tensor, one at a time in memory.

The format is a length (8 bytes, little endian), a JSON header with each tensor's dtype, shape
and place, and the bytes of the tensors. https://huggingface.co/docs/safetensors
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit.models.safetensors_folder import INDEX, SINGLE
from toolkit.models.sliced_file import SlicedFile

if TYPE_CHECKING:
    from hashlib import _Hash

LARGEST_FILE_BYTES = 5_000_000_000

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to write: its shape immediately, its values lazily."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]
    """The tensor in pieces that follow one another in its flattened form."""

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize

    def telling(self, tick: Callable[[int], None]) -> "TensorToWrite":
        """The same tensor, calling `tick` with each piece's bytes when it has been written."""

        def pieces() -> Iterator[Tensor]:
            for piece in self.pieces():
                yield piece
                tick(piece.nbytes)

        return replace(self, pieces=pieces)


def write_model(
    folder: Path, entries: Sequence[TensorToWrite], limit: int = LARGEST_FILE_BYTES
) -> None:
    """Write a model's files as transformers names them: several with an index above `limit`."""
    files = in_files(entries, limit)
    if len(files) == 1:
        write_file(folder / SINGLE, files[0])
        return
    weight_map: dict[str, str] = {}
    for number, content in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / name, content)
        weight_map |= dict.fromkeys((entry.name for entry in content), name)
    total = sum(entry.nbytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def in_files(
    entries: Iterable[TensorToWrite], limit: int = LARGEST_FILE_BYTES
) -> list[list[TensorToWrite]]:
    """Fill files in order; a tensor larger than the limit has its own file."""
    files: list[list[TensorToWrite]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def write_file(
    path: Path, entries: Iterable[TensorToWrite], digest: "_Hash | None" = None
) -> None:
    """Write and sync one safetensors file; `digest` gets all its bytes."""
    # The order of the safetensors library, in which every tensor is aligned to its elements.
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with SlicedFile(path, digest) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in ordered:
            start = file.tell()
            for piece in entry.pieces():
                assert piece.dtype == entry.dtype, entry.name
                flat = piece.contiguous().reshape(-1)
                if flat.numel():
                    file.write(flat.view(torch.uint8).numpy().data)
            assert file.tell() - start == entry.nbytes, entry.name
        os.fsync(file.fileno())
