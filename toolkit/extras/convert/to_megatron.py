"""Converts a Hugging Face folder to a Megatron checkpoint that every TP, PP and EP can load."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from toolkit.errors import DataError
from toolkit.extras.convert.checkpoint_keys import written_place
from toolkit.extras.convert.source import (
    KEPT,
    NAMES_FILE,
    RELEASE,
    TRACKER,
    UNMAPPED_FILE,
    ConvertibleModel,
    companion_files,
    shape_of,
    whole_blocks,
)
from toolkit.extras.convert.torch_dist import Writer
from toolkit.models.families.base import Instance
from toolkit.models.families.tensors import overlaps
from toolkit.models.safetensors_stream import read_entries, write_file
from toolkit.models.weights import TIED_HEAD, SafetensorsWeights

CHUNK_ELEMENTS = 1 << 25
"""Largest piece of a tensor in memory: 64 MiB in 16 bits."""
COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""3.0 is Megatron-LM's version with query, key and value in the order of our maps."""


class ToMegatron:
    """The conversion of one folder.

    Raises DataError if a tensor is missing, has a wrong shape or does not match the config.
    """

    notes: tuple[str, ...] = ()
    """What the user should know of the weights."""

    def __init__(self, source: ConvertibleModel, vocab_multiple: int) -> None:
        self.source = source
        self.vocab_multiple = vocab_multiple
        shapes = {name: shape_of(parts) for name, parts in source.tensors().items()}
        # The first name is the embedding's; its first word that of the decoder.
        embedding = next(iter(shapes))
        prefix = embedding.split(".")[0]
        config_name = source.config_file.name
        self.weights = SafetensorsWeights(source.folder, shapes, prefix, config_name)
        self.names = {name: self.weights.stored_name(name) for name in shapes}
        if TIED_HEAD not in shapes:
            copy = self.weights.stored_copy(TIED_HEAD, embedding)
            # Only its name is kept: the reverse conversion writes the embedding under both.
            self.names |= {TIED_HEAD: copy} if copy else {}
        self.unmapped = list(read_entries(self.weights.stored, self.weights.buffers))
        """Kept for the reverse conversion."""
        files = {source.folder / file for file in self.weights.files.values()}
        self.nbytes = sum(file.stat().st_size for file in files)

    def write(self, folder: Path, tick: Callable[[int], None]) -> None:
        """Write the checkpoint into an empty folder; `tick` gets the bytes of each piece."""
        with Writer(folder / RELEASE) as writer:
            for instance in self.source.model.instances(buffers=True):
                self._write(writer, instance, tick)
            writer.finish(COMMON)
        kept = folder / KEPT
        kept.mkdir()
        for file in companion_files(self.source.folder):
            shutil.copyfile(file, kept / file.name)
        (kept / NAMES_FILE).write_text(json.dumps(self.names, indent=1) + "\n")
        if self.unmapped:
            telling = [entry.telling(tick) for entry in self.unmapped]
            write_file(kept / UNMAPPED_FILE, telling)
        (folder / TRACKER).write_text(RELEASE)

    def _write(self, writer: Writer, instance: Instance, tick: Callable[[int], None]) -> None:
        """Write one Megatron tensor, some rows at a time."""
        tensor, place = instance.tensor, written_place(self.source.model, instance)
        padding = -tensor.rows % self.vocab_multiple if tensor.padded else 0
        columns = () if tensor.columns is None else (tensor.columns,)
        size = (*place.sizes, tensor.rows + padding, *columns)
        leading, corner = (1,) * len(place.index), (0,) * len(columns)
        step = max(1, CHUNK_ELEMENTS // (tensor.columns or 1))
        rows = torch.empty(0)
        for first in range(0, tensor.rows, step):
            rows = self._rows(instance, first, min(first + step, tensor.rows))
            offset = (*place.index, first, *corner)
            writer.add(place.key, size, offset, rows.view(*leading, *rows.shape))
            tick(rows.nbytes)
        if padding:
            zeros = torch.zeros(*leading, padding, *columns, dtype=rows.dtype)
            writer.add(place.key, size, (*place.index, tensor.rows, *corner), zeros)
        if (extra := place.extra_state) is not None:
            writer.add_empty_object(extra)

    def _rows(self, instance: Instance, first: int, last: int) -> Tensor:
        """Rows [first, last) of a Megatron tensor."""
        stacked = whole_blocks(instance)
        cut = overlaps(stacked, lambda block: len(block.row_numbers), first, last)
        parts = [self.weights.read_block(block.between(low, high)) for block, low, high in cut]
        if len({part.dtype for part in parts}) > 1:
            raise DataError(
                f"{self.source.folder}: the tensors that make up {instance.tensor.name} differ "
                "in dtype",
                fix="save the model in one dtype first",
            )
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
