"""Attention of some positions to some others: one block of a softmax that has several.

A block's backward with the output and log-sum-exp of the whole softmax is its part of the
gradient, so that no more than one block's scores exist. On CPUs only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from toolkit.models.context.runs import bounds
from toolkit.models.documents import Scores, masked_products

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

    def mask(self, window: int | None) -> Tensor | None:
        """bool [queries, keys]; None if every query sees all the keys."""
        queries, keys = (x.stop - x.start for x in (self.queries, self.keys))
        last = self.distance + queries - 1
        if self.distance and (window is None or last <= window):
            return None
        distance = torch.arange(self.distance, last + 1)[:, None] - torch.arange(keys)
        sees = distance >= 0
        return sees if window is None else sees & (distance <= window)

    def kernel_options(self, q: Tensor, scores: Scores) -> dict[str, Any]:
        """The same for torch's kernel, which needs no mask for a causal square."""
        last = self.queries.stop - self.queries.start - 1
        causal = not self.distance and (scores.window is None or last <= scores.window)
        sees, bias = None if causal else self.mask(scores.window), None
        if sees is not None:
            bias = q.new_zeros(sees.shape).masked_fill_(~sees, float("-inf"))
        return {"dropout_p": 0.0, "is_causal": causal, "attn_mask": bias, "scale": scores.scale}


def visible(
    ends: Sequence[int], length: int, ranks: int, mine: int, other: int, window: int | None
) -> Iterator[AttentionBlock]:
    """The blocks in which queries of rank `mine` see keys of rank `other`, where rows have
    documents with `ends`. Slices count a rank's own positions of all rows."""
    run = length // (2 * ranks)
    q_runs, k_runs = (enumerate(bounds(length, rank, ranks)) for rank in (mine, other))
    pairs = [*product(q_runs, k_runs)]
    for begin, end in pairwise(ends):
        row, first = divmod(begin, length)
        last = first + end - begin
        for (q_run, (q_first, q_last)), (k_run, (k_first, k_last)) in pairs:
            if k_first > q_first:
                continue
            q, q_end = max(first, q_first), min(last, q_last)
            k, k_end = max(first, k_first), min(last, k_last)
            if window is not None:
                k, q_end = max(k, q - window), min(q_end, k_end + window)
            if q < q_end and k < k_end:
                to_query, to_key = (
                    (2 * row + q_run) * run - q_first,
                    (2 * row + k_run) * run - k_first,
                )
                yield AttentionBlock(
                    slice(q + to_query, q_end + to_query),
                    slice(k + to_key, k_end + to_key),
                    q - k,
                )


def forward(
    q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The block's output and log-sum-exp, [queries, heads, size] and [queries, heads], of
    [positions, heads, size] and keys and values of [positions, groups, size]."""
    q, k, v = _inputs(q, k, v, block)
    if scores.cap is not None:
        out, lse = _capped(q, k, v, block, scores)
    else:
        out, lse = _FORWARD(q, k, v, **block.kernel_options(q, scores))
    return out[0].transpose(0, 1), lse[0].mT


def backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    block: AttentionBlock,
    scores: Scores,
) -> Iterator[Tensor]:
    """The block's part of the gradients of queries, keys and values. `out` and `lse`: of the
    whole softmax."""
    q, k, v = _inputs(*inputs, block)
    of_block = (x[block.queries].transpose(0, 1)[None] for x in (gradient, out, lse[..., None]))
    gradient, out, lse = of_block
    lse = lse[..., 0]
    if scores.cap is not None:
        found = _capped_backward(gradient, (q, k, v), out, lse, block, scores)
    else:
        options = block.kernel_options(q, scores)
        found = _BACKWARD(gradient, q, k, v, out, lse, **options)
    return (x[0].transpose(0, 1) for x in found)


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        x.transpose(0, 1)[None] for x in (q[block.queries], k[block.keys], v[block.keys])
    )
    return q, k, v


def _capped(
    q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Plain products: no kernel caps scores."""
    weights, v = masked_products(q, k, v, block.mask(scores.window), scores)
    lse = weights.logsumexp(dim=-1)
    return (weights - lse[..., None]).exp().to(v.dtype) @ v, lse


def _capped_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    block: AttentionBlock,
    scores: Scores,
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        own_out, own_lse = _capped(q, k, v, block, scores)
    share = (own_lse.detach() - lse).exp()[..., None]  # of the block in the whole softmax
    of_out = gradient * share
    of_lse = (of_out * (own_out.detach() - out)).sum(dim=-1)
    return torch.autograd.grad(
        (own_out, own_lse), (q, k, v), (of_out.to(own_out.dtype), of_lse.to(own_lse.dtype))
    )
