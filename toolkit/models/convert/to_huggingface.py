"""A Megatron checkpoint, saved by any layout, becomes a Hugging Face folder again."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from toolkit.errors import CheckpointError
from toolkit.models.convert.checkpoint_keys import Place, found_place
from toolkit.models.convert.safetensors_stream import Entry, read_file, write_model
from toolkit.models.convert.source import (
    NAMES_FILE,
    UNMAPPED_FILE,
    Part,
    Source,
    companion_files,
    shape_of,
)
from toolkit.models.convert.torch_dist import Reader
from toolkit.models.families import FAMILIES
from toolkit.models.families.base import Instance

PIECE_ELEMENTS = 1 << 25
"""Largest piece of a tensor that is put together: 64 MiB in 16 bits."""
_WEIGHTS = ("decoder.", "embedding.", "output_layer.")
"""How the keys of model weights begin; what is left of a checkpoint is training state."""


class ToHuggingFace:
    """The conversion of one checkpoint. Raises CheckpointError when config and keys differ."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reader = Reader(source.folder)
        self._tensors = source.tensors()
        self._places = self._find()
        names = self._names()
        self.entries = [
            self._entry(names[name], parts) for name, parts in self._tensors.items()
        ]
        if unmapped := self._kept(UNMAPPED_FILE):
            self.entries += read_file(unmapped)
        self.nbytes = sum(entry.nbytes for entry in self.entries)

    def write(self, folder: Path, tick: Callable[[int], None]) -> None:
        """Write the folder, which exists and is empty; `tick` is told of bytes as they pass."""
        write_model(folder, [entry.telling(tick) for entry in self.entries])
        shutil.copyfile(self.source.config_file, folder / "config.json")
        if self.source.companions is not None:
            for file in companion_files(self.source.companions):
                shutil.copyfile(file, folder / file.name)

    def _kept(self, name: str) -> Path | None:
        """A file that the conversion to Megatron left beside the config."""
        folder = self.source.companions
        return folder / name if folder is not None and (folder / name).is_file() else None

    def _find(self) -> Mapping[Instance, Place]:
        """Where the checkpoint holds each tensor of the model; no weight may be left over."""
        keys = self.reader.tensors
        places: dict[Instance, Place] = {}
        for instance in self.source.model.instances():
            place = found_place(self.source.model, instance, keys)
            if place is None:
                raise self._misfit(f"it has no {instance.tensor.name}")
            self._check_shape(instance, place)
            places[instance] = place
        rest = keys.keys() - {place.key for place in places.values()}
        if weights := sorted(key for key in rest if key.startswith(_WEIGHTS)):
            raise self._misfit(f"the model has no {', '.join(weights[:3])}")
        return places

    def _check_shape(self, instance: Instance, place: Place) -> None:
        tensor, found = instance.tensor, self.reader.tensors[place.key].size
        columns = () if tensor.columns is None else (tensor.columns,)
        rows, axis = tensor.rows, len(place.sizes)
        if tensor.padded and len(found) > axis:
            rows = max(rows, found[axis])
        wanted = (*place.sizes, rows, *columns)
        if found != wanted:
            raise self._misfit(f"{place.key} has shape {found}, the model needs {wanted}")

    def _misfit(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source.folder} does not fit {self.source.config_file}: {what}",
            fix="pass the config of this checkpoint with --config",
        )

    def _names(self) -> Mapping[str, str]:
        """The names for the files: those kept at conversion, else those of the family."""
        kept = self._kept(NAMES_FILE)
        if kept is None:
            family = FAMILIES[self.source.family]
            return {name: family.published_name(name) for name in self._tensors}
        names: dict[str, str] = json.loads(kept.read_text())
        if names.keys() != self._tensors.keys():
            raise CheckpointError(f"{kept} does not fit the config beside it")
        return names

    def _entry(self, name: str, parts: Sequence[Part]) -> Entry:
        key = self._places[parts[0].instance].key
        dtype = self.reader.tensors[key].dtype
        return Entry(name, dtype, shape_of(parts), partial(self._pieces, parts))

    def _pieces(self, parts: Sequence[Part]) -> Iterator[Tensor]:
        """One checkpoint tensor, some rows at a time where its rows lie together."""
        ordered = sorted(parts, key=lambda part: part.block.rows)
        if ordered[0].block.transposed:
            yield torch.cat([piece for part in ordered for piece in self._rows(part)]).T
            return
        for part in ordered:
            yield from self._rows(part)

    def _rows(self, part: Part) -> Iterator[Tensor]:
        """The rows of a Megatron tensor that are this part."""
        place, block = self._places[part.instance], part.block
        columns = () if block.columns is None else (block.columns[1],)
        last = part.row + block.rows[1] - block.rows[0]
        step = max(1, PIECE_ELEMENTS // (columns[0] if columns else 1))
        for row in range(part.row, last, step):
            rows = min(step, last - row)
            offset = (*place.index, row, *(0,) * len(columns))
            size = (*(1,) * len(place.index), rows, *columns)
            yield self.reader.read(place.key, offset, size).reshape(rows, *columns)
