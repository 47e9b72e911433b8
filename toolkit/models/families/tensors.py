"""How one Megatron tensor consists of checkpoint tensors, and which part a rank holds.

Two facts describe every weight of every family:

- the rows of the whole Megatron tensor are rows of Hugging Face tensors, stacked in some
  order (`stacks`): a fused qkv matrix is q, k and v rows of one head group after another;
- tensor parallelism gives each rank an equal slice of the rows, of the columns, or the
  whole (`split`).

From these, `blocks` answers "which rectangles of which checkpoint tensors, stacked on top
of each other, are this rank's shard?". Loading reads the rectangles, export writes them
back: one description serves both directions.

A vector is a matrix with one column. Nothing here imports torch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

Part = TypeVar("Part")
Split = Literal["rows", "columns", "none"]


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a checkpoint tensor."""

    tensor: str
    """Name in the Hugging Face checkpoint. `{layer}` and `{expert}` stand for numbers."""
    start: int
    stop: int
    step: int = 1
    """Distance between rows: 2 where gate and up projection alternate."""

    @property
    def numbers(self) -> range:
        """The rows' numbers."""
        return range(self.start, self.stop, self.step)


@dataclass(frozen=True)
class TensorMap:
    """One Megatron tensor of one family.

    The rows of a stack are cut into equal slices by tensor parallelism. With two stacks
    (gate and up of a gated MLP) each rank holds its slice of the first, then of the second.
    """

    name: str
    """Megatron's parameter name. `{layer}` and `{expert}` stand for numbers."""
    stacks: tuple[tuple[Rows, ...], ...]
    """Rows of the whole tensor, in Megatron's order. `start` and `stop` count rows of the
    tensor as Megatron holds it, after a transposition."""
    columns: int | None
    """Columns of the whole tensor. None for a vector."""
    split: Split
    transposed: bool = False
    """The checkpoint stores [in, out] (GPT-2's Conv1D) where Megatron holds [out, in]."""
    padded: bool = False
    """Zeros fill the rows up to a multiple of the tensor-parallel degree (vocabulary)."""
    experts: int = 0
    """The checkpoint's tensor holds so many experts, of which each has this tensor's rows, one
    expert after the other. 0: it is of one."""
    interleaved: bool = False
    """Each expert has instead this tensor's columns: expert e the columns e, e + experts, …"""

    @property
    def rows(self) -> int:
        """Rows of the whole tensor, padding not counted."""
        return sum(len(part.numbers) for stack in self.stacks for part in stack)


@dataclass(frozen=True)
class Block:
    """A rectangle of a checkpoint tensor, in Megatron's orientation."""

    tensor: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    """None for a vector."""
    transposed: bool
    steps: tuple[int, int] = (1, 1)
    """Distance between rows, and between columns."""

    @property
    def row_numbers(self) -> range:
        """The rows' numbers."""
        return range(*self.rows, self.steps[0])

    @property
    def column_numbers(self) -> range:
        """The columns' numbers. A vector has one."""
        return range(*(self.columns or (0, 1)), self.steps[1])

    @property
    def stored(self) -> "Block":
        """This rectangle, turned the way the checkpoint stores it."""
        if not self.transposed:
            return self
        assert self.columns is not None, "a vector is not transposed"
        return Block(self.tensor, self.columns, self.rows, False, self.steps[::-1])

    def between(self, first: int, last: int) -> "Block":
        """The first but `first` of its rows, up to the one before `last`."""
        return replace(self, rows=ends(self.row_numbers[first:last]))


def ends(numbers: range) -> tuple[int, int]:
    """The first number, and the end: one more than the last."""
    return numbers[0], numbers[-1] + 1


def overlaps(
    parts: Iterable[Part], size: Callable[[Part], int], start: int, stop: int
) -> Iterator[tuple[Part, int, int]]:
    """The parts inside [start, stop) when all are laid end to end. Each has its own start and
    end there."""
    offset = 0
    for part in parts:
        length = size(part)
        low, high = max(start - offset, 0), min(stop - offset, length)
        if low < high:
            yield part, low, high
        offset += length


def blocks(
    tensor: TensorMap,
    rank: int,
    degree: int,
    *,
    layer: int | None = None,
    expert: int | None = None,
) -> list[Block]:
    """The blocks that, stacked, are the shard of tensor-parallel rank `rank` of `degree`.

    `layer` and `expert` are the numbers of the whole model. Rows that padding adds are not
    among the blocks. Raises ValueError when `degree` does not divide what is split.
    """
    columns = (0, tensor.columns) if tensor.columns is not None else None
    if tensor.split == "columns":
        assert tensor.columns is not None, "a vector has no columns to split"
        columns = _slice(tensor.columns, rank, degree)
    numbers = {"layer": layer, "expert": expert}
    first, apart = 0, 1
    if tensor.experts:
        assert expert is not None, "a tensor of all experts"
        if tensor.interleaved:
            assert tensor.columns is not None, "a matrix"
            apart = tensor.experts
            columns = (expert, expert + (tensor.columns - 1) * apart + 1)
        else:
            first = expert * tensor.rows
    return [
        Block(
            part.tensor.format(**numbers),
            (first + part.start, first + part.stop),
            columns,
            tensor.transposed,
            (part.step, apart),
        )
        for stack in tensor.stacks
        for part in _rank_rows(stack, tensor, rank, degree)
    ]


def _rank_rows(
    stack: Sequence[Rows], tensor: TensorMap, rank: int, degree: int
) -> Iterator[Rows]:
    """This rank's rows of one stack."""
    if tensor.split != "rows":
        yield from stack
        return
    rows = sum(len(part.numbers) for part in stack)
    if tensor.padded:
        rows += -rows % degree
    low, high = _slice(rows, rank, degree)
    for part, first, last in overlaps(stack, lambda part: len(part.numbers), low, high):
        yield Rows(part.tensor, *ends(part.numbers[first:last]), part.step)


def _slice(size: int, rank: int, degree: int) -> tuple[int, int]:
    share, rest = divmod(size, degree)
    if rest:
        raise ValueError(f"{size} cannot be split into {degree} equal parts")
    return rank * share, (rank + 1) * share


# --- the forms that occur ---------------------------------------------------------------


def whole(name: str, tensor: str, rows: int, columns: int | None = None) -> TensorMap:
    """A tensor that every rank holds whole: norms, routers, learned positions."""
    return TensorMap(name, ((Rows(tensor, 0, rows),),), columns, "none")


def by_rows(
    name: str,
    tensor: str,
    rows: int,
    columns: int | None = None,
    *,
    transposed: bool = False,
    padded: bool = False,
) -> TensorMap:
    """Output features split over the ranks (Megatron's ColumnParallelLinear), or the
    vocabulary (`padded`)."""
    return TensorMap(name, ((Rows(tensor, 0, rows),),), columns, "rows", transposed, padded)


def by_columns(
    name: str, tensor: str, rows: int, columns: int, *, transposed: bool = False
) -> TensorMap:
    """Input features split over the ranks (Megatron's RowParallelLinear)."""
    return TensorMap(name, ((Rows(tensor, 0, rows),),), columns, "columns", transposed)


def gated(name: str, gate: str, up: str, rows: int, columns: int | None) -> TensorMap:
    """Gate and up projection in one matrix. `rows` counts those of one of them.

    One name twice stands for a tensor that holds gate and up one after the other.
    """
    first = rows if gate == up else 0
    stacks = ((Rows(gate, 0, rows),), (Rows(up, first, first + rows),))
    return TensorMap(name, stacks, columns, "rows")


def gated_alternating(name: str, tensor: str, rows: int, columns: int | None) -> TensorMap:
    """Gate and up projection in one matrix, `rows` of each, of a tensor that holds them [in,
    out] in alternating columns. A bias alternates likewise."""
    gate, up = ((Rows(tensor, first, 2 * rows - 1 + first, 2),) for first in (0, 1))
    return TensorMap(name, (gate, up), columns, "rows", transposed=columns is not None)


def fused_qkv(
    name: str,
    tensors: tuple[str, str, str],
    heads: tuple[int, int, int],
    columns: int | None,
    *,
    transposed: bool = False,
) -> TensorMap:
    """Query, key and value in one matrix: for each group its queries, its key, its value.

    `heads`: of queries and of keys, and the features of one head.
    `tensors` name the checkpoint's q, k and v. One name three times stands for a tensor
    that holds q, k and v one after the other (GPT-2).
    """
    (q, k, v), (count, groups, size) = tensors, heads
    keys = values = 0
    if q == k == v:
        keys = count * size
        values = keys + groups * size
    queries = count // groups * size
    stack: list[Rows] = []
    for group in range(groups):
        low = group * size
        stack += [
            Rows(q, group * queries, (group + 1) * queries),
            Rows(k, keys + low, keys + low + size),
            Rows(v, values + low, values + low + size),
        ]
    return TensorMap(name, (tuple(stack),), columns, "rows", transposed)
