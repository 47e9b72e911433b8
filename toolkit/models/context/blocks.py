"""Attention of some positions to some others: one block of a softmax that has several.

A block's backward with the output and log-sum-exp of the whole softmax is its part of the
gradient, so that no more than one block's scores exist. On CPUs; on CUDA: flash_blocks.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from toolkit.models.context.runs import SplitRows
from toolkit.models.documents import Scores, masked_products, sees

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class AttentionBlock:
    """Queries and the keys that some of them see. Every query sees at least one: torch's kernel
    returns 0 as the log-sum-exp of one that sees none."""

    queries: slice
    keys: slice
    distance: int
    """Positions from the first key to the first query; 0: they are at the same positions."""
    scores: Scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output and log-sum-exp, [queries, heads, size] and [queries, heads], of
        [positions, heads, size] and keys and values of [positions, groups, size]."""
        q, k, v = self._inputs(q, k, v)
        if self.scores.cap is not None:
            out, lse = self._capped(q, k, v)
        else:
            out, lse = _FORWARD(q, k, v, **self._options(q))
        return out[0].transpose(0, 1), lse[0].mT

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Iterator[Tensor]:
        """The block's part of the gradients of queries, keys and values; `out` and `lse` are
        those of the whole softmax."""
        inputs = self._inputs(q, k, v)
        gradient, out = (x[self.queries].transpose(0, 1)[None] for x in (gradient, out))
        lse = lse[self.queries].mT[None]
        if self.scores.cap is not None:
            found = self._capped_backward(gradient, inputs, out, lse)
        else:
            found = _BACKWARD(gradient, *inputs, out, lse, **self._options(inputs[0]))
        return (x[0].transpose(0, 1) for x in found)

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = q[self.queries], k[self.keys], v[self.keys]
        q, k, v = (x.transpose(0, 1)[None] for x in chosen)
        return q, k, v

    def _mask(self) -> Tensor | None:
        """bool [queries, keys]; None if every query sees all the keys."""
        window = self.scores.window
        queries, keys = (x.stop - x.start for x in (self.queries, self.keys))
        last = self.distance + queries - 1
        if self.distance and (window is None or last <= window):
            return None
        return sees(torch.arange(self.distance, last + 1)[:, None] - torch.arange(keys), window)

    def _options(self, q: Tensor) -> dict[str, Any]:
        """The same for torch's kernel, which needs no mask for a causal square."""
        last, window = self.queries.stop - self.queries.start - 1, self.scores.window
        causal = not self.distance and (window is None or last <= window)
        mask, bias = None if causal else self._mask(), None
        if mask is not None:
            bias = q.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        scale = self.scores.scale
        return {"dropout_p": 0.0, "is_causal": causal, "attn_mask": bias, "scale": scale}

    def _capped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Plain products: no kernel caps scores."""
        weights, v = masked_products(q, k, v, self._mask(), self.scores)
        lse = weights.logsumexp(dim=-1)
        return (weights - lse[..., None]).exp().to(v.dtype) @ v, lse

    def _capped_backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in inputs)
            own_out, own_lse = self._capped(q, k, v)
        share = (own_lse.detach() - lse).exp()[..., None]  # of the block in the whole softmax
        of_out = gradient * share
        of_lse = (of_out * (own_out.detach() - out)).sum(dim=-1)
        of_both = of_out.to(own_out.dtype), of_lse.to(own_lse.dtype)
        return torch.autograd.grad((own_out, own_lse), (q, k, v), of_both)


def visible(rows: SplitRows, other: int, scores: Scores) -> Iterator[AttentionBlock]:
    """The blocks in which this rank's queries see keys of rank `other`. Slices count positions
    of the first run of all rows, and then of the second."""
    q_runs, k_runs = (enumerate(rows.bounds(rank)) for rank in (rows.rank, other))
    pairs, window = [*product(q_runs, k_runs)], scores.window
    for begin, end in pairwise(rows.ends.tolist()):
        row, first = divmod(begin, rows.length)
        last = first + end - begin
        for (q_run, (q_first, q_last)), (k_run, (k_first, k_last)) in pairs:
            if k_first > q_first:
                continue
            q, q_end = max(first, q_first), min(last, q_last)
            k, k_end = max(first, k_first), min(last, k_last)
            if window is not None:
                k, q_end = max(k, q - window), min(q_end, k_end + window)
            if q < q_end and k < k_end:
                to_q, to_k = (
                    (number * rows.batch + row) * rows.run - start
                    for number, start in ((q_run, q_first), (k_run, k_first))
                )
                queries, keys = slice(q + to_q, q_end + to_q), slice(k + to_k, k_end + to_k)
                yield AttentionBlock(queries, keys, q - k, scores)
