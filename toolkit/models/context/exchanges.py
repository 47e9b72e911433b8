"""Which positions a context rank computes, and how ranks exchange what attention needs.

A row is cut into twice as many equal runs as there are ranks. Rank r computes run r and,
counted from the end, run r again. So the queries of all ranks see equally many keys.
"""

from collections.abc import Callable, Mapping, Sequence
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from toolkit.layout import Exchange
from toolkit.models.documents import Scores, attend

_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch 2.13 has these names, and warns of the former ones."""


def all_gather(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    scores: Scores,
    group: dist.ProcessGroup,
) -> Tensor:
    """`Context.attend` with the keys and values of whole rows on every rank.

    A reduce-scatter sums their gradients. Any number of heads.
    """
    keys, values = (natural(gathered(x, group, summed=True)) for x in (key, value))
    length = keys.shape[1]
    outputs = [
        attend(queries, keys, values, *run_ends(ends, length, first, end), scores)
        for queries, (first, end) in zip(
            query.chunk(2, dim=1), bounds(length, group.rank(), group.size()), strict=True
        )
    ]
    return torch.cat(outputs, dim=1)


def ulysses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    scores: Scores,
    group: dist.ProcessGroup,
) -> Tensor:
    """`Context.attend` with a part of the heads on every rank, at the positions of all ranks.

    All-to-all from positions to heads and back (arXiv:2309.14509). Keys and values are
    repeated where they have fewer heads than there are ranks.
    """
    ranks, groups = group.size(), key.shape[2]
    assert query.shape[2] % ranks == 0, "refused at check"
    if times := lcm(groups, ranks) // groups - 1:
        key, value = (x.repeat_interleave(times + 1, dim=2) for x in (key, value))
    q, k, v = (_positions_of_some_heads(x, group) for x in (query, key, value))
    output = attend(q, k, v, ends, ends, scores.of_heads(group.rank(), ranks))
    return exchanged(shares(output, ranks), group).movedim(0, 2).flatten(2, 3)


ATTENTION: Mapping[Exchange, Callable[..., Tensor]] = {
    "all_gather": all_gather,
    "ulysses": ulysses,
}
"""Attention by the value of `kernels.context`."""


def _positions_of_some_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, own, heads, size] → [batch, positions of all ranks, heads / ranks, size]."""
    by_rank = x.unflatten(2, (group.size(), -1)).movedim(2, 0)  # type: ignore[no-untyped-call]
    return natural(exchanged(by_rank, group))


def own_group(groups: Sequence[list[int]]) -> dist.ProcessGroup:
    """Make groups of ranks, which together are all ranks, and return this rank's. Collective.

    Not `use_local_synchronization`, with which only a group's own ranks would meet: torch then
    names a group by its ranks and the number of groups that exist. The second of a name would
    find the addresses of the first one in the store, and hang.
    """
    create: Any = dist.new_subgroups_by_enumeration
    group: dist.ProcessGroup = create(groups)[0]
    return group


def gathered(x: Tensor, group: dist.ProcessGroup, *, summed: bool) -> Tensor:
    """`x` of every rank, [ranks, …].

    `summed`: each rank computes something else with it, and the gradient is the sum over ranks.
    Otherwise all ranks compute the same, and backward takes this rank's part.
    """
    whole: Tensor = _Gather.apply(x, group, summed)  # type: ignore[no-untyped-call]
    return whole


def exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, …], for each rank → [ranks, …], from each rank."""
    return all_to_all_single_autograd(x.contiguous(), None, None, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, summed: bool) -> Tensor:
        ctx.group, ctx.summed = group, summed
        whole = x.new_empty(group.size(), *x.shape)
        _ALL_GATHER(whole.flatten(0, 1), x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.summed:
            return gradient[ctx.group.rank()], None, None
        part = gradient.new_empty(gradient.shape[1:])
        _REDUCE_SCATTER(part, gradient.contiguous().flatten(0, 1), group=ctx.group)
        return part, None, None


# --- the runs of a row ------------------------------------------------------------------


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
