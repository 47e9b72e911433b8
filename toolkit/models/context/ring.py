"""Keys and values travel from rank to rank: none ever has those of whole rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from toolkit.errors import BackendUnavailable
from toolkit.models.context import blocks
from toolkit.models.documents import Scores


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
        if query.is_cuda:
            raise BackendUnavailable(
                "kernels.context ring computes on CPUs only: its blocks are untested on CUDA",
                fix="set kernels.context to all_gather",
            )
        batch, own, heads, size = query.shape
        if scores.scale is None:
            scores = replace(scores, scale=size**-0.5)
        width = max(size, value.shape[-1])  # the kernel has one for queries, keys and values
        q, k, v = (
            (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))).flatten(0, 1)
            for x in (query, key, value)
        )
        rows = _Rows(self.group, tuple(ends.tolist()), own * self.group.size(), scores)
        out: Tensor = _RingAttention.apply(q, k, v, scores.sinks, rows)  # type: ignore[no-untyped-call]
        return out[..., : value.shape[-1]].view(batch, own, heads, -1)


@dataclass(frozen=True)
class _Rows:
    """What is not a tensor."""

    group: dist.ProcessGroup
    ends: Sequence[int]
    length: int
    scores: Scores

    def blocks(self, other: int) -> Iterator[blocks.AttentionBlock]:
        """In which this rank's queries see keys of rank `other`."""
        ranks, mine = self.group.size(), self.group.rank()
        return blocks.visible(self.ends, self.length, ranks, mine, other, self.scores.window)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rows: _Rows
    ) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=exact)
        # A sink is a score of its own, with the value 0: the first block.
        first = torch.tensor(float("-inf")) if sinks is None else sinks
        lse = first.to(exact).expand(q.shape[:2]).clone()
        for other, (keys, values) in _visitors(torch.stack([k, v]), rows.group):
            for block in rows.blocks(other):
                part, part_lse = blocks.forward(q, keys, values, block, rows.scores)
                before = lse[block.queries]
                after = torch.logaddexp(before, part_lse)
                part = part.to(exact) * (part_lse - after).exp()[..., None]
                out[block.queries].mul_((before - after).exp()[..., None]).add_(part)
                lse[block.queries] = after
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        rows, gradient = ctx.rows, gradient.contiguous()
        kv = torch.stack([k, v])
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        of_kv = torch.zeros_like(kv, dtype=lse.dtype)
        for other, (keys, values) in _visitors(kv, rows.group):
            for block in rows.blocks(other):
                inputs = q, keys, values
                found = blocks.backward(gradient, inputs, out, lse, block, rows.scores)
                sums = of_q[block.queries], *of_kv[:, block.keys]
                for total, part in zip(sums, found, strict=True):
                    total += part
            # With its keys; once round, they are where they belong.
            of_kv = _Passed(of_kv, rows.group).arrived()
        of_sinks = None
        if sinks is not None:
            share = (sinks - lse).exp()
            of_sinks = -(share * (gradient * out).sum(dim=-1)).sum(dim=0).to(sinks.dtype)
        of_k, of_v = of_kv.to(k.dtype)
        return of_q.to(q.dtype), of_k, of_v, of_sinks, None


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
