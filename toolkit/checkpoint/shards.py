"""A rank's part of the training state, independently of the engine.

The state of a run is three fp32 tensors for every tensor of the Hugging Face checkpoint: the
weight and Adam's two moments, unless the optimizer keeps other states (`state_quantities`). A
rank holds some of their elements, as its engine declares: a `StateShard` is a range of elements
with the corresponding rectangles (`Block`) of checkpoint tensors. Saving writes the rectangles
under names that describe them. Loading reads the rectangles that the new layout needs. So every
checkpoint serves every layout and engine.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, nn

from toolkit.errors import CheckpointError
from toolkit.models.families.tensors import Block, ends, overlaps
from toolkit.models.weights import checkpoint_names, correction_biases
from toolkit.optimizers.base import MOMENTS, OPTIMIZERS, Quantity

QUANTITIES = ("weight", *MOMENTS)
"""The fp32 weight, and Adam's first and second moment. Muon's momentum is a first one."""
OUTER_QUANTITIES = ("outer_anchor", "outer_momentum")
"""Quantities of runs with `parallel.outer` only."""
_KINDS = {
    **dict.fromkeys((*QUANTITIES, *OUTER_QUANTITIES), Quantity()),
    **{
        name: quantity
        for _, kind in OPTIMIZERS.items()
        if kind.whole is not None
        for name, quantity in kind.whole.quantities.items()
    },
}
STORED = tuple(_KINDS)
"""Every quantity."""

_RECTANGLE = re.compile(r"\[([\d:]+)(?:,([\d:]+))?\]")
_NUMBERS = re.compile(r"(\d+):(\d+)(?::(\d+))?")


class StateShard:
    """Elements of the training state that this rank holds."""

    def __init__(
        self, blocks: Sequence[Block], values: Mapping[str, Tensor], *, saved_here: bool
    ) -> None:
        self.blocks = tuple(blocks)
        """The elements, flattened one block after the other in the block's orientation."""
        self.saved_here = saved_here
        """Whether this rank, among those that hold the same elements, writes them."""
        self._values = values

    in_memory = True
    """False if `get` already returns a copy."""

    @property
    def quantities(self) -> tuple[str, ...]:
        """The quantities of the elements: only the weight if they are frozen."""
        return tuple(self._values)

    @property
    def trains(self) -> bool:
        """Whether the elements have moments."""
        return len(self.quantities) > 1

    def get(self, quantity: str) -> Tensor:
        """The values of `quantity`, flat. Elements beyond the blocks are padding.

        A copy if a frozen weight is kept in 16 bits.
        """
        return self._values[quantity].detach().view(-1).to(dtype_of(quantity))

    def put(self, quantity: str, values: Tensor) -> None:
        """Replace the values of `quantity`. `values` [elements of the blocks] is flat."""
        self._values[quantity].detach().view(-1)[: values.numel()].copy_(values)


def parameter_blocks(name: str, shape: Sequence[int]) -> tuple[Block, ...]:
    """The blocks that, flattened one after the other, are a transformers parameter."""
    return tuple(whole_block(p.name, p.shape) for p in checkpoint_names(name, shape))


def bias_shards(model: nn.Module, *, saved_here: bool) -> Iterator[StateShard]:
    """The correction biases of a transformers model, which every rank holds."""
    for name, bias in correction_biases(model).items():
        blocks = parameter_blocks(name, bias.shape)
        yield StateShard(blocks, {"weight": bias}, saved_here=saved_here)


def joint_shape(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The shape of the tensor that these rectangles cover: (rows,) or (rows, columns)."""
    rows = max(block.rows[1] for block in blocks)
    columns = [block.columns[1] for block in blocks if block.columns is not None]
    return (rows, max(columns)) if columns else (rows,)


def stored_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """(rows,) or (rows, columns): the further axes of a convolution are columns, too."""
    rows, *others = shape or (1,)
    return (rows, prod(others)) if others else (rows,)


def whole_block(tensor: str, shape: Sequence[int]) -> Block:
    """All of a checkpoint tensor, as a vector or a matrix."""
    rows, *columns = stored_shape(shape)
    return Block(tensor, (0, rows), (0, columns[0]) if columns else None, transposed=False)


def state_quantities(optimizer: str, tensor: str, shape: Sequence[int]) -> tuple[str, ...]:
    """The quantities of a tensor that trains, with the optimizer of this name.

    Raises CheckpointError if no package has this optimizer.
    """
    if optimizer not in OPTIMIZERS.names:
        raise CheckpointError(f"its optimizer, {optimizer}, is not installed")
    whole, stored = OPTIMIZERS[optimizer].whole, stored_shape(shape)
    if whole is None or not whole.takes(tensor, len(stored)):
        return QUANTITIES
    return ("weight", *whole.moments, *whole.owned(stored))


def dtype_of(quantity: str) -> torch.dtype:
    """The dtype in which a quantity is kept and stored."""
    dtype: torch.dtype = getattr(torch, _KINDS[quantity].dtype)
    return dtype


def whole_quantity(quantity: str, tensor: str, shape: Sequence[int]) -> Block:
    """All of a quantity of a checkpoint tensor of this shape."""
    return whole_block(tensor, _KINDS[quantity].shape(stored_shape(shape)))


def block_numel(block: Block) -> int:
    """Elements of a block."""
    return len(block.row_numbers) * len(block.column_numbers)


def block_shape(block: Block) -> tuple[int, ...]:
    """(rows, columns) or (rows,)."""
    rows = len(block.row_numbers)
    return (rows,) if block.columns is None else (rows, len(block.column_numbers))


def cut(blocks: Sequence[Block], start: int, stop: int) -> list[Block]:
    """The blocks of elements [start, stop) of flattened `blocks`. The rest is padding.

    A range of elements of a matrix is at most three rectangles: the end of a row, whole rows,
    the beginning of a row.
    """
    return [
        part
        for block, low, high in overlaps(blocks, block_numel, start, stop)
        for part in _rectangles(block, low, high)
    ]


def _rectangles(block: Block, low: int, high: int) -> Iterator[Block]:
    width = len(block.column_numbers)
    while low < high:
        row, column = divmod(low, width)
        whole_rows = (high - low) // width if column == 0 else 0
        rows, end = (whole_rows, width) if whole_rows else (1, min(width, column + high - low))
        part = block.between(row, row + rows)
        if block.columns is not None:
            part = replace(part, columns=ends(block.column_numbers[column:end]))
        yield part
        low += rows * (end - column)


def with_offsets(blocks: Sequence[Block]) -> Iterator[tuple[Block, int]]:
    """Each block with the offset of its first element among those of all."""
    offset = 0
    for block in blocks:
        yield block, offset
        offset += block_numel(block)


def stored_values(block: Block, offset: int, flat: Tensor) -> Tensor:
    """The block's rectangle of a shard's `flat` values, in the form of `Block.stored`."""
    values = flat[offset : offset + block_numel(block)]
    if block.columns is None:
        return values
    rectangle = values.view(-1, len(block.column_numbers))
    return rectangle.T if block.transposed else rectangle


def key_of(quantity: str, block: Block) -> str:
    """The name of a stored rectangle: `exp_avg/model.norm.weight[0:64]`. Every other column of
    a matrix: `[0:64,0:95:2]`."""
    assert not block.transposed, "stored as the checkpoint has it"
    columns = "" if block.columns is None else f",{_spelt(block.column_numbers)}"
    return f"{quantity}/{block.tensor}[{_spelt(block.row_numbers)}{columns}]"


def _spelt(numbers: range) -> str:
    step = f":{numbers.step}" if numbers.step > 1 else ""
    return f"{numbers.start}:{numbers.stop}{step}"


@lru_cache(1 << 16)  # many tensors are cut alike
def rectangle(spelt: str) -> Block | None:
    """The rectangle `[0:64,0:95:2]` of a tensor without a name. None if it is invalid."""
    match = _RECTANGLE.fullmatch(spelt)
    if match is None:
        return None
    rows, columns = (None if axis is None else _numbers(axis) for axis in match.groups())
    if rows is None or (columns is None) != (match[2] is None):
        return None
    steps = rows.step, columns.step if columns else 1
    return Block("", ends(rows), ends(columns) if columns else None, False, steps)


def _numbers(spelt: str) -> range | None:
    """The range of an axis in a stored name. None if it is invalid."""
    match = _NUMBERS.fullmatch(spelt)
    step = int(match[3] or 1) if match else 0
    return range(int(match[1]), int(match[2]), step) or None if match and step else None
