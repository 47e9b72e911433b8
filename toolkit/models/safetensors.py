"""Safetensors files: those of a Hugging Face folder, read by slices, and new ones, written with
one tensor at a time in memory (the safetensors library writes whole models).

The format is a length (8 bytes, little endian), a JSON header with each tensor's dtype, shape
and place, and the bytes of the tensors. https://huggingface.co/docs/safetensors
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import SafetensorError, TensorSpec, safe_open

from toolkit.errors import DataError
from toolkit.system.untrusted import read_json

if TYPE_CHECKING:
    from hashlib import _Hash

    import torch
    from torch import Tensor

INDEX = "model.safetensors.index.json"
"""The index of tensors if there are several files."""
SINGLE = "model.safetensors"
_SLICE_BYTES = 1 << 20
"""Linux file systems take several times longer for one write of 64 MiB to a new file than for
64 writes of 1 MiB (measured on ext4: 0.4 against 4.4 GB/s)."""
_AGAIN = "download or copy the file again (`git lfs pull` in a git clone)"


def open_file(path: Path, framework: str = "pt") -> Any:
    """An open safetensors file with values of `framework`. Raises DataError when it is missing
    or damaged."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} cannot be read: it is not a file", fix=_AGAIN)
    try:
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}", fix=_AGAIN) from error


class SafetensorsFolder:
    """Tensors by the names that the files give them. A file is opened when it is needed.

    Raises DataError, which names the file, for missing or damaged ones.
    """

    def __init__(self, folder: Path, framework: str = "pt") -> None:
        self.folder = folder
        self._framework = framework
        self._handles: dict[str, Any] = {}

    @cached_property
    def files(self) -> dict[str, str]:
        """Tensor name → file name, of every tensor in the files that the index names."""
        if (self.folder / INDEX).is_file():
            return self._files_of(_read_index(self.folder / INDEX))
        if not (self.folder / SINGLE).is_file():
            raise DataError(
                f"{self.folder} holds no {SINGLE}",
                fix="use a model with safetensors weights; pickled weights "
                "(pytorch_model.bin) can run code and are not read",
            )
        return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)

    def part(self, name: str) -> Any:
        """A lazy tensor of `files`: only requested slices are read."""
        return self._handle(self.files[name]).get_slice(name)

    def finite(self, name: str, values: Any) -> Any:
        """`values`, which were read of a tensor. Raises DataError for NaN and infinity."""
        # A sum is several times faster than a check of each; it may also overflow for finite
        # values, and float8 has none.
        if (
            values.dtype.itemsize == 1
            or math.isfinite(values.sum())
            or (values - values == 0).all()
        ):
            return values
        raise DataError(
            f"{self.folder / self.files[name]}: {name} holds NaN or infinity",
            fix=f"{_AGAIN}, or start from an earlier checkpoint",
        )

    def _files_of(self, index: dict[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for file in dict.fromkeys(index.values()):
            found |= dict.fromkeys(self._handle(file).keys(), file)
        for name, file in index.items():
            if name not in found:
                raise DataError(
                    f"{self.folder / file} has no tensor {name}, though {INDEX} says so",
                    fix=_AGAIN,
                )
        return found | index

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = open_file(self.folder / file, self._framework)
        return self._handles[file]


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = read_json(path)["weight_map"]
        files = {str(name): Path(file).name for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be read: it is no index of tensors ({type(error).__name__})",
            fix=_AGAIN,
        ) from error
    if files != weight_map:
        raise DataError(f"{path} names files outside its folder", fix=_AGAIN)
    return files


# --- writing ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to write: its shape immediately, its values lazily."""

    name: str
    dtype: "torch.dtype"
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable["Tensor"]]
    """The tensor in pieces that follow one another in its flattened form."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_dtype(self) -> str:
        """The format's name of its type."""
        name = str(self.dtype).removeprefix("torch.")
        spec = TensorSpec(dtype=name, shape=self.shape, data_ptr=0, data_len=self.nbytes)
        return spec.dtype

    def telling(self, tick: Callable[[int], None]) -> "TensorToWrite":
        """This tensor, calling `tick` with the bytes of each piece that was written."""

        def pieces() -> Iterator["Tensor"]:
            for piece in self.pieces():
                yield piece
                tick(piece.nbytes)

        return replace(self, pieces=pieces)


def write_model(folder: Path, entries: Iterable[TensorToWrite]) -> None:
    """Write a model's files as transformers names them: a large model's with an index."""
    files = in_files(entries)
    for name, content in files.items():
        write_file(folder / name, content)
    if len(files) > 1:
        weight_map = {entry.name: name for name, content in files.items() for entry in content}
        total = sum(entry.nbytes for content in files.values() for entry in content)
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def in_files(entries: Iterable[TensorToWrite]) -> dict[str, list[TensorToWrite]]:
    """The tensors of each file of a model, as huggingface_hub distributes and names them."""
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name: dict[str, Any] = {entry.name: entry for entry in entries}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=attrgetter("nbytes"),
        filename_pattern=SINGLE.replace(".", "{suffix}."),
    )
    return {
        file: [by_name[name] for name in names]
        for file, names in split.filename_to_tensors.items()
    }


def write_file(
    path: Path, entries: Iterable[TensorToWrite], digest: "_Hash | None" = None
) -> None:
    """Write and sync one safetensors file. `digest` gets all its bytes."""
    import torch

    # The order of the safetensors library, in which every tensor is aligned to its elements.
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": entry.stored_dtype,
            "shape": entry.shape,
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file, len(text).to_bytes(8, "little") + text, digest)
        for entry in ordered:
            start = file.tell()
            for piece in entry.pieces():
                assert piece.dtype == entry.dtype, entry.name
                flat = piece.contiguous().reshape(-1)
                if flat.numel():
                    _write(file, flat.view(torch.uint8).numpy().data, digest)
            assert file.tell() - start == entry.nbytes, entry.name
        os.fsync(file.fileno())


def _write(file: BinaryIO, data: bytes | memoryview, digest: "_Hash | None") -> None:
    """Write all of `data`, a slice at a time. `digest` sees every byte."""
    view = memoryview(data)
    while len(view):
        written = file.write(view[:_SLICE_BYTES])
        if digest is not None:
            digest.update(view[:written])
        view = view[written:]
