"""Keys and values travel from rank to rank: none ever has those of whole rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from toolkit.models.context import blocks, flash_blocks
from toolkit.models.context.runs import SplitRows
from toolkit.models.documents import WIDTHS, Scores

VISIBLE: dict[str, Callable[..., Iterator[Any]]] = {
    "cpu": blocks.visible,
    "cuda": flash_blocks.visible,
}
"""By the type of device: the blocks of a softmax."""


@dataclass(frozen=True)
class Ring:
    """Ring attention (arXiv:2310.01889): the softmax of the keys of one rank after the other,
    merged by log-sum-exp. Only a rank's own positions are kept for the backward pass, in which
    keys and values travel again, with their gradients."""

    group: dist.ProcessGroup

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scores: Scores
    ) -> Tensor:
        """See `Context.attend`."""
        batch, own, heads, size = query.shape
        if scores.scale is None:
            scores = replace(scores, scale=size**-0.5)
        width = -(-max(size, value.shape[-1]) // WIDTHS) * WIDTHS
        q, k, v = (_run_by_run(x, width) for x in (query, key, value))
        ranks = self.group.size()
        rows = SplitRows(ends, batch, own * ranks, self.group.rank(), ranks)
        attention = _RingAttention.apply
        out: Tensor = attention(q, k, v, scores.sinks, rows, scores, self.group)  # type: ignore[no-untyped-call]
        by_run = out[..., : value.shape[-1]].view(2, batch, own // 2, heads, -1)
        return by_run.transpose(0, 1).flatten(1, 2)


def _run_by_run(x: Tensor, width: int) -> Tensor:
    """[batch, own, heads, size] → the first run of all rows, then the second: [positions,
    heads, width], as kernels take it."""
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    if x.shape[-1] < width:
        x = pad(x, (0, width - x.shape[-1]))
    return torch.cat([run.flatten(0, 1) for run in x.chunk(2, dim=1)])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rows: SplitRows,
        scores: Scores,
        group: dist.ProcessGroup,
    ) -> Tensor:
        kv = torch.stack([k, v])
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=exact)
        # A sink is a score of its own, with the value 0: the first block.
        first = q.new_tensor(float("-inf")) if sinks is None else sinks
        lse = first.to(exact).expand(q.shape[:2]).clone()
        for other, (keys, values) in _visitors(kv, group):
            for block in VISIBLE[q.device.type](rows, other, scores):
                part, part_lse = block.forward(q, keys, values)
                before = lse[block.queries]
                after = torch.logaddexp(before, part_lse)
                part = part.to(exact) * (part_lse - after).exp()[..., None]
                out[block.queries].mul_((before - after).exp()[..., None]).add_(part)
                lse[block.queries] = after
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, sinks, out, lse)
        ctx.rows, ctx.scores, ctx.group = rows, scores, group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, kv, sinks, out, lse = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        of_kv = torch.zeros_like(kv, dtype=lse.dtype)
        for other, (keys, values) in _visitors(kv, ctx.group):
            for block in VISIBLE[q.device.type](ctx.rows, other, ctx.scores):
                of_block = block.backward(gradient, q, keys, values, out, lse)
                sums = of_q[block.queries], *of_kv[:, block.keys]
                for total, part in zip(sums, of_block, strict=True):
                    total += part
            # With its keys; once round, they are where they belong.
            of_kv = _Passed(of_kv, ctx.group).arrived()
        of_sinks = None
        if sinks is not None:
            share = (sinks - lse).exp()
            of_sinks = -(share * (gradient * out).sum(dim=-1)).sum(dim=0).to(sinks.dtype)
        of_k, of_v = of_kv.to(kv.dtype)
        return of_q.to(q.dtype), of_k, of_v, of_sinks, None, None, None


def _visitors(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Each rank's tensor, with its number, this rank's first; the next arrives meanwhile."""
    ranks, rank = group.size(), group.rank()
    for step in range(ranks - 1):
        passed = _Passed(own, group)
        yield (rank - step) % ranks, own
        own = passed.arrived()
    yield (rank + 1) % ranks, own


class _Passed:
    """A tensor on its way to the next rank."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        ranks, rank = group.size(), group.rank()
        after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        self._sent, self._coming = tensor, torch.empty_like(tensor)
        self._transfers = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group),
                dist.P2POp(dist.irecv, self._coming, before, group),
            ]
        )

    def arrived(self) -> Tensor:
        """The one of the rank before."""
        for transfer in self._transfers:
            transfer.wait()
        return self._coming
