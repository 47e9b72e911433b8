"""How the ranks of a context group exchange what attention needs, and their collectives."""

from collections.abc import Callable, Mapping, Sequence
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.layout import Exchange
from toolkit.models.context.runs import bounds, natural, run_ends, shares
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
"""By the value of `kernels.context`."""


def _positions_of_some_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, own, heads, size] → [batch, positions of all ranks, heads / ranks, size]."""
    by_rank = x.unflatten(2, (group.size(), -1)).movedim(2, 0)  # type: ignore[no-untyped-call]
    return natural(exchanged(by_rank, group))


def own_group(groups: Sequence[list[int]]) -> dist.ProcessGroup:
    """Make groups of ranks, which together are all ranks, and return this rank's; collective.

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
    arrived: Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return arrived


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


class _AllToAll(torch.autograd.Function):
    """The inverse of itself, which is also its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        arrived = torch.empty_like(x)
        dist.all_to_all_single(arrived, x, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _AllToAll.forward(ctx, gradient, ctx.group), None
