"""The safetensors files of a Hugging Face folder: the file of each tensor, and its slices."""

import math
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from toolkit.errors import DataError
from toolkit.system.untrusted import read_json

INDEX = "model.safetensors.index.json"
"""The index of tensors if there are several files."""
SINGLE = "model.safetensors"
_LFS = b"version https://git-lfs"
_AGAIN = "download or copy the file again"


def open_file(path: Path, framework: str = "pt") -> Any:
    """An open safetensors file with values of `framework`. Raises DataError when it is missing
    or damaged."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} cannot be read: it is not a file", fix=_AGAIN)
    try:
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        if _is_lfs_pointer(path):
            pull = "run `git lfs pull` in its folder, or download the file"
            raise DataError(f"{path} is a Git LFS pointer to the file", fix=pull) from error
        raise DataError(f"{path} cannot be read: {error}", fix=_AGAIN) from error


def _is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has left a note about a file in its place."""
    with suppress(OSError), path.open("rb") as stream:
        return stream.read(len(_LFS)) == _LFS
    return False


class SafetensorsFolder:
    """Tensors by the names that the files give them; a file is opened when it is needed.

    Raises DataError, which names the file, for missing or damaged ones.
    """

    def __init__(self, folder: Path, only: str | None = None, framework: str = "pt") -> None:
        self.folder = folder
        self._framework = framework
        self.only = only
        """The one file to look at; None for the model's."""
        self._handles: dict[str, Any] = {}

    @cached_property
    def files(self) -> dict[str, str]:
        """Tensor name → file name, of every tensor in the files that the index names."""
        if self.only is not None:
            return dict.fromkeys(self._handle(self.only).keys(), self.only)
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
