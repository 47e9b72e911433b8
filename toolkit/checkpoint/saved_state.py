"""Reads a checkpoint's tensors: any rectangle of them, from whichever files hold it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toolkit.checkpoint.index import DAMAGED, read_index
from toolkit.checkpoint.manifest import Manifest, file_in
from toolkit.checkpoint.shards import (
    OUTER_QUANTITIES,
    STORED,
    StateShard,
    block_numel,
    block_shape,
    cut,
    dtype_of,
    joint_shape,
    parameter_blocks,
    rectangle,
    whole_quantity,
)
from toolkit.errors import CheckpointError
from toolkit.models.families.tensors import Block, ends

ELEMENTS_AT_ONCE = 1 << 24
"""Elements of one tensor that are in memory while it is copied."""


@dataclass(frozen=True)
class StoredRectangle:
    """A stored rectangle of a tensor."""

    block: Block
    file: str
    key: str
    """The name in the file, which states the rectangle."""


class SavedState:
    """The tensors of one checkpoint folder, from the files that its manifest names.

    Files are opened when they are first needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, Any] = {}

    def close(self) -> None:
        """Close the files: a mapped file keeps its disk space after it is removed."""
        self._handles.clear()
        self.__dict__.pop("_index", None)

    @cached_property
    def _index(self) -> dict[str, str]:
        return read_index(self.folder)

    @cached_property
    def _adapters_alone(self) -> bool:
        return Manifest.read(self.folder).adapter is not None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor with its shape: (rows,) or (rows, columns)."""
        return {
            tensor: joint_shape([part.block for part in self.parts(quantity, tensor)])
            for quantity, tensor in sorted(self.names())
            if quantity == "weight"
        }

    def quantities(self, tensor: str) -> list[str]:
        """The stored quantities of a tensor: only the weight if it is frozen."""
        return [quantity for quantity in STORED if f"{quantity}/{tensor}" in self._index]

    def names(self) -> list[tuple[str, str]]:
        """Every quantity and tensor for which something is stored."""
        names = (name.partition("/") for name in self._index)
        return [(quantity, tensor) for quantity, _, tensor in names]

    def parts(self, quantity: str, tensor: str) -> Iterator[StoredRectangle]:
        """The stored rectangles of a tensor. Raises CheckpointError for what is none."""
        name = f"{quantity}/{tensor}"
        for part in self._index.get(name, "").split():
            number, bracket, rest = part.partition("[")
            block = rectangle(bracket + rest)
            if block is None or quantity not in STORED:
                raise CheckpointError(
                    f"{self.folder} holds {name}{bracket}{rest}, which is no part of a state"
                )
            yield StoredRectangle(block, f"state-{number}.safetensors", name + bracket + rest)

    def stored_form(self, part: StoredRectangle) -> tuple[str, tuple[int, ...]]:
        """Type, by safetensors' name, and shape of a rectangle in its file."""
        header = self._slice(part)
        return header.get_dtype(), tuple(header.get_shape())

    def read(self, quantity: str, block: Block) -> Tensor:
        """A rectangle in the block's orientation: fp32, [rows, columns] or [rows].

        Raises CheckpointError if the checkpoint does not hold all of it.
        """
        if block.transposed:
            return self.read(quantity, block.stored).T
        found = 0
        values: Tensor | None = None
        for stored in self.parts(quantity, block.tensor):
            common = intersection(block, stored.block)
            if common is None:
                continue
            part = self._read_part(stored, common)
            if block_numel(common) == block_numel(block):
                return part
            if values is None:
                values = torch.empty(block_shape(block), dtype=dtype_of(quantity))
            values[_inside(common, block)] = part
            found += block_numel(common)
        if values is None or found != block_numel(block):
            raise CheckpointError(
                f"{self.folder} does not hold {quantity} of {block.tensor}, rows "
                f"{block.rows[0]} to {block.rows[1]}",
                fix="resume with the model that it was saved from",
            )
        return values

    def in_pieces(self, quantity: str, tensor: str) -> Iterator[Tensor]:
        """A whole quantity, some rows at a time: fp32, [rows, columns] or [rows]."""
        for piece in pieces(whole_quantity(quantity, tensor, self.shapes[tensor])):
            yield self.read(quantity, piece)

    def _read_part(self, stored: StoredRectangle, part: Block) -> Tensor:
        axes = _inside(part, stored.block)
        whole = self._slice(stored)
        try:
            values: Tensor = whole[tuple(slice(axis.start, axis.stop) for axis in axes)]
        except (OSError, SafetensorError) as error:
            raise self._unreadable(stored, error) from error
        return values[tuple(slice(None, None, axis.step) for axis in axes)]

    def _slice(self, stored: StoredRectangle) -> Any:
        """Open a rectangle. Returns a reader that loads only the elements asked for."""
        try:
            if stored.file not in self._handles:
                path = file_in(self.folder, stored.file)
                self._handles[stored.file] = safe_open(path, "pt")
            return self._handles[stored.file].get_slice(stored.key)
        except (OSError, SafetensorError) as error:
            raise self._unreadable(stored, error) from error

    def _unreadable(self, stored: StoredRectangle, error: Exception) -> CheckpointError:
        path = self.folder / stored.file
        return CheckpointError(f"{path} cannot be read: {error}", fix=DAMAGED)

    def load(self, shard: StateShard) -> None:
        """Load all quantities of a rank's shard. Frozen shards of a run with adapters keep the
        values that the model was built with."""
        if self._adapters_alone and not shard.trains:
            return
        for quantity in shard.quantities:
            if quantity in OUTER_QUANTITIES and not any(
                quantity in self.quantities(block.tensor) for block in shard.blocks
            ):
                continue  # the run had no `parallel.outer` yet
            parts = [self.read(quantity, block).reshape(-1) for block in shard.blocks]
            if parts:
                shard.put(quantity, parts[0] if len(parts) == 1 else torch.cat(parts))


class SavedWeights:
    """The weights of a checkpoint as a `WeightSource`: what a resumed model is built with.

    `shapes` are the parameters of the transformers model.
    """

    def __init__(self, state: SavedState, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.state = state
        self.shapes = shapes

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `WeightSource.read`: fp32."""
        blocks = cut(parameter_blocks(name, self.shapes[name]), start, stop)
        parts = [self.read_block(block).reshape(-1) for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_block(self, block: Block) -> Tensor:
        """See `WeightSource.read_block`: fp32."""
        return self.state.read("weight", block)


def pieces(whole: Block) -> Iterator[Block]:
    """A whole tensor in rectangles of some rows, of about `ELEMENTS_AT_ONCE`."""
    last = whole.rows[1]
    step = max(1, ELEMENTS_AT_ONCE * last // block_numel(whole))
    for first in range(0, last, step):
        yield replace(whole, rows=(first, min(first + step, last)))


def intersection(a: Block, b: Block) -> Block | None:
    """The intersection of two rectangles of the same tensor."""
    if a.rows[1] <= b.rows[0] or b.rows[1] <= a.rows[0]:
        return None  # as most are
    rows = _common(a.row_numbers, b.row_numbers)
    columns = _common(a.column_numbers, b.column_numbers)
    if not rows or not columns:
        return None
    vector = a.columns is None or b.columns is None
    steps = rows.step, columns.step
    return Block(a.tensor, ends(rows), None if vector else ends(columns), False, steps)


def _common(a: range, b: range) -> range:
    """The intersection of two ranges."""
    step = lcm(a.step, b.step)
    low, high = max(a.start, b.start), min(a.stop, b.stop)
    first = next((n for n in range(low, low + step) if n in a and n in b), high)
    return range(first, high, step)


def _inside(part: Block, whole: Block) -> tuple[slice, ...]:
    """The position of `part` in an array that holds `whole`."""
    axes = [(part.row_numbers, whole.row_numbers)]
    if part.columns is not None and whole.columns is not None:
        axes.append((part.column_numbers, whole.column_numbers))
    return tuple(
        slice(all_.index(some[0]), all_.index(some[-1]) + 1, some.step // all_.step)
        for some, all_ in axes
    )
