"""Converts a Megatron checkpoint, saved in any layout, to a Hugging Face folder."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from toolkit.errors import CheckpointError
from toolkit.extras.convert.checkpoint_keys import TensorLocation, found_place
from toolkit.extras.convert.source import (
    NAMES_FILE,
    UNMAPPED_FILE,
    ConvertibleModel,
    TensorBlock,
    companion_files,
    shape_of,
)
from toolkit.extras.convert.torch_dist import Reader
from toolkit.models.families import FAMILIES
from toolkit.models.families.base import Instance
from toolkit.models.safetensors_folder import SafetensorsFolder
from toolkit.models.safetensors_stream import TensorToWrite, read_entries, write_model
from toolkit.models.weights import TIED_HEAD, is_of_stack
from toolkit.system.untrusted import read_json

PIECE_ELEMENTS = 1 << 25
"""Largest piece of a tensor that is assembled: 64 MiB in 16 bits."""
_TRAINING_STATE = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|.*\._extra_state")
"""Keys of tensors that are not weights; all others of a checkpoint must belong to the model."""
_MEGATRON_LM_MULTIPLES = tuple(128 * tp for tp in range(1, 65))
"""The multiple to which Megatron-LM pads the vocabulary by default: 128 for each TP rank."""


class ToHuggingFace:
    """The conversion of one checkpoint.

    `vocab_multiple`: its vocabulary may be padded to this, in addition to Megatron-LM's
    defaults. Raises CheckpointError when config and keys differ, or a file is damaged.
    """

    def __init__(self, source: ConvertibleModel, vocab_multiple: int = 128) -> None:
        self.source = source
        self.multiples = (vocab_multiple, *_MEGATRON_LM_MULTIPLES)
        self.notes: tuple[str, ...] = ()
        """What the user should know of the weights."""
        self.reader = Reader(source.folder)
        self._tensors = source.tensors()
        self._places = self._find()
        self.entries = [*self._entries(), *self._unmapped()]
        names = Counter(entry.name for entry in self.entries)
        if twice := sorted(name for name, times in names.items() if times > 1):
            raise CheckpointError(
                f"{self.source.companions} names {', '.join(twice[:3])} twice",
                fix="convert the Hugging Face folder to Megatron again",
            )
        self.nbytes = sum(entry.nbytes for entry in self.entries)

    def write(self, folder: Path, tick: Callable[[int], None]) -> None:
        """Write the empty folder; `tick` is called with the bytes of each piece."""
        write_model(folder, [entry.telling(tick) for entry in self.entries])
        shutil.copyfile(self.source.config_file, folder / "config.json")
        if self.source.companions is not None:
            for file in companion_files(self.source.companions):
                shutil.copyfile(file, folder / file.name)

    def _kept(self, name: str) -> Path | None:
        """A file that the conversion to Megatron left next to the config."""
        folder = self.source.companions
        return folder / name if folder is not None and (folder / name).is_file() else None

    def _find(self) -> Mapping[Instance, TensorLocation]:
        """Where the checkpoint holds each tensor of the model; all weights must be used."""
        keys = self.reader.tensors
        places: dict[Instance, TensorLocation] = {}
        for instance in self.source.model.instances(buffers=True):
            place = found_place(self.source.model, instance, keys)
            if place is None:
                raise self._misfit(f"it has no {instance.tensor.name}")
            self._check_shape(instance, place)
            places[instance] = place
        rest = keys.keys() - {place.key for place in places.values()}
        if weights := sorted(key for key in rest if not _TRAINING_STATE.match(key)):
            raise self._misfit(f"the model has no {', '.join(weights[:3])}")
        return places

    def _check_shape(self, instance: Instance, place: TensorLocation) -> None:
        tensor, found = instance.tensor, self.reader.tensors[place.key].size
        columns = () if tensor.columns is None else (tensor.columns,)
        if tensor.padded and len(found) == 2 and found[0] > tensor.rows:
            self._check_padding(place.key, tensor.rows)
            found = (tensor.rows, found[1])
        wanted = (*place.sizes, tensor.rows, *columns)
        if found != wanted:
            raise self._misfit(f"{place.key} has shape {found}, the model needs {wanted}")

    def _check_padding(self, key: str, rows: int) -> None:
        """Drop the rows from `rows` on only if they can be padding.

        Zeros always can. Megatron-LM initialises its padding randomly like any row, so rows
        with values can be padding if a usual multiple explains their number.
        """
        padded, columns = self.reader.tensors[key].size
        extra = padded - rows
        usual = any(padded % multiple == 0 and extra < multiple for multiple in self.multiples)
        step = max(1, PIECE_ELEMENTS // columns)
        if not usual and any(
            self.reader.read(key, (row, 0), (min(step, padded - row), columns)).any()
            for row in range(rows, padded, step)
        ):
            raise CheckpointError(
                f"{self.source.folder}: {key} has {padded} rows, {extra} more than the "
                f"vocab_size {rows} of {self.source.config_file}; they hold values and are no "
                "padding to a multiple of 128 for each TP rank",
                fix=f"set vocab_size: {padded} in that config to keep them, or say with "
                "--vocab-multiple to the multiple of the padding",
            )
        note = f"{extra} rows of padding beyond vocab_size ({rows}) are left out"
        self.notes = tuple(dict.fromkeys((*self.notes, note)))

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
        try:
            names = read_json(kept)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{kept} cannot be read: {error}") from error
        # A tied head is named where the Hugging Face folder stored it besides the embedding.
        if (
            not isinstance(names, dict)
            or names.keys() - {TIED_HEAD} != self._tensors.keys() - {TIED_HEAD}
            or not names.keys() >= self._tensors.keys()
            or not all(isinstance(name, str) and name for name in names.values())
        ):
            raise CheckpointError(f"{kept} does not fit the config next to it")
        return names

    def _entries(self) -> Iterator[TensorToWrite]:
        """The model's tensors; a tied head is the embedding under a second name, and a stack
        of experts the tensors of all of them."""
        embedding = next(iter(self._tensors.values()))
        stacks: dict[str, list[Sequence[TensorBlock]]] = {}
        for name, stored in self._names().items():
            parts = self._tensors.get(name, embedding)
            if is_of_stack(name):
                stacks.setdefault(stored, []).append(parts)
            else:
                yield self._entry(stored, [parts], shape_of(parts))
        for stored, experts in stacks.items():
            yield self._entry(stored, experts, (len(experts), *shape_of(experts[0])))

    def _unmapped(self) -> Iterator[TensorToWrite]:
        """Additional tensors of the Hugging Face folder that are not the model's."""
        kept = self._kept(UNMAPPED_FILE)
        if kept is not None:
            stored = SafetensorsFolder(kept.parent, only=kept.name)
            yield from read_entries(stored, stored.files)

    def _entry(
        self, name: str, tensors: Sequence[Sequence[TensorBlock]], shape: tuple[int, ...]
    ) -> TensorToWrite:
        key = self._places[tensors[0][0].instance].key
        dtype = self.reader.tensors[key].dtype

        def pieces() -> Iterator[Tensor]:
            for parts in tensors:
                yield from self._pieces(parts)

        return TensorToWrite(name, dtype, shape, pieces)

    def _pieces(self, parts: Sequence[TensorBlock]) -> Iterator[Tensor]:
        """One checkpoint tensor, some rows at a time if its rows are contiguous."""
        ordered = sorted(parts, key=lambda part: part.block.rows)
        if any(part.block.transposed or part.block.steps[0] > 1 for part in ordered):
            yield self._whole(ordered)
            return
        for part in ordered:
            yield from self._rows(part)

    def _whole(self, parts: Sequence[TensorBlock]) -> Tensor:
        """A checkpoint tensor that is transposed, or whose parts alternate."""
        rows = [torch.cat([*self._rows(part)]) for part in parts]
        whole = rows[0].new_empty(sum(map(len, rows)), *rows[0].shape[1:])
        for part, values in zip(parts, rows, strict=True):
            numbers = part.block.row_numbers
            whole[numbers.start : numbers.stop : numbers.step] = values
        return whole.T if parts[0].block.transposed else whole

    def _rows(self, part: TensorBlock) -> Iterator[Tensor]:
        """The rows of a Megatron tensor that are this part."""
        place, block = self._places[part.instance], part.block
        columns = () if block.columns is None else (block.columns[1],)
        last = part.row + len(block.row_numbers)
        step = max(1, PIECE_ELEMENTS // (columns[0] if columns else 1))
        for row in range(part.row, last, step):
            rows = min(step, last - row)
            offset = (*place.index, row, *(0,) * len(columns))
            size = (*(1,) * len(place.index), rows, *columns)
            yield self.reader.read(place.key, offset, size).reshape(rows, *columns)
