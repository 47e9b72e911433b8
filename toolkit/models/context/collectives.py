"""Groups of ranks, and the collectives of a context group that gradients pass through."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""By the names since torch 2.13, which warns of those before."""


def own_group(groups: Sequence[list[int]]) -> dist.ProcessGroup:
    """Make groups of ranks, which together are all ranks; this rank's. Collective among all.

    Not `use_local_synchronization`, with which only a group's own ranks would meet: torch then
    names a group by its ranks and the number of groups that exist, and the second of a name
    would find the first one's addresses in the store, and wait for ever.
    """
    create: Any = dist.new_subgroups_by_enumeration
    group: dist.ProcessGroup = create(groups)[0]
    return group


def gathered(x: Tensor, group: dist.ProcessGroup, *, summed: bool) -> Tensor:
    """`x` of every rank, [ranks, …].

    `summed`: whether each rank computes something else with it, so that the gradient is the sum
    over ranks; without it all compute the same, and backward takes this rank's.
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
        mine = gradient.new_empty(gradient.shape[1:])
        _REDUCE_SCATTER(mine, gradient.contiguous().flatten(0, 1), group=ctx.group)
        return mine, None, None


class _AllToAll(torch.autograd.Function):
    """Its own inverse, and so its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        arrived = torch.empty_like(x)
        dist.all_to_all_single(arrived, x, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        arrived = torch.empty_like(gradient)
        dist.all_to_all_single(arrived, gradient, group=ctx.group)
        return arrived, None
