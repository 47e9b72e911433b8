"""Which positions a context rank computes.

A row is cut into twice as many equal runs as there are ranks; rank r computes run r and,
counted from the end, run r again. So the queries of all ranks see equally many keys.
"""

import torch
from torch import Tensor


def bounds(length: int, rank: int, ranks: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """[first, end) of the two runs of `rank` in a row of `length`."""
    assert length % (2 * ranks) == 0, f"refused at check: {length} positions, {ranks} ranks"
    run = length // (2 * ranks)
    head, tail = rank * run, length - (rank + 1) * run
    return (head, head + run), (tail, tail + run)


def own(rows: Tensor, rank: int, ranks: int) -> Tensor:
    """The runs of `rank` in [batch, length, …]."""
    runs = bounds(rows.shape[1], rank, ranks)
    return torch.cat([rows[:, first:end] for first, end in runs], dim=1)


def natural(runs: Tensor) -> Tensor:
    """[ranks, batch, own positions, …] → [batch, length, …]: the inverse of `own`."""
    heads, tails = runs.chunk(2, dim=2)
    return torch.cat([heads, tails.flip(0)]).transpose(0, 1).flatten(1, 2)


def shares(rows: Tensor, ranks: int) -> Tensor:
    """The inverse of `natural`: what each rank owns of [batch, length, …]."""
    return torch.stack([own(rows, rank, ranks) for rank in range(ranks)])


def run_ends(ends: Tensor, length: int, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Where positions [first, end) of every row attend to the documents with `ends`: the
    boundaries of queries and of keys for `documents.attend`.

    Two segments for each document: what it has up to the end of the run, which the queries that
    it has in the run see; and the rest, without queries. Tensor operations only: the host does
    not wait for a GPU.
    """
    begins = ends[:-1]
    row = begins.div(length, rounding_mode="floor") * length
    seen = torch.minimum(torch.maximum(row + end, begins), ends[1:])
    keys = torch.cat([torch.stack([begins, seen], dim=1).flatten(), ends[-1:]])
    return _ends_within(keys, length, first, end), keys.int()


def _ends_within(ends: Tensor, length: int, first: int, end: int) -> Tensor:
    """`ends` counted in positions [first, end) of every row alone."""
    row, place = ends.div(length, rounding_mode="floor"), ends.remainder(length)
    return (row * (end - first) + (place - first).clamp(0, end - first)).int()
