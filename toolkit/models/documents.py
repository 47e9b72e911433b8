"""Attention inside documents of different lengths that share the rows of a micro batch.

On CUDA by torch's kernel for such lengths, whose time grows with the documents and not with the
square of the row. On CPUs one document after the other. Neither makes a mask: transformers and
megatron-core pass `MicroBatch.ends` to their layers in its place, with the `SplitAttention` of
rows that are spread over ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import dropout, pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations import sdpa_attention

from toolkit.batch import MicroBatch
from toolkit.errors import BackendUnavailable

IMPLEMENTATION = "documents"
"""Name of this attention in the config of a transformers model."""
_HAS_GROUPS = "enable_gqa" in signature(varlen_attn).parameters
"""torch 2.12 has it, 2.11 repeats keys and values."""
_WIDTHS = 8
"""FlashAttention's head sizes are multiples of this."""
_INPUTS = ("position_bias", "indices", "block_indices")
"""Arguments that some of transformers' layers pass to attention, and this one lacks."""
_find_documents = masking_utils.find_packed_sequence_indices
_takes_grouped_heads = sdpa_attention.use_gqa_in_sdpa


@dataclass(frozen=True)
class Scores:
    """How a layer changes q·k."""

    scale: float | None = None
    """None: 1 / √size."""
    window: int | None = None
    """How many previous positions a query sees, None: all."""
    cap: float | None = None
    """c of c · tanh(q·k / c)."""
    sinks: Tensor | None = None
    """[heads]: see `SinkAttention` of models/megatron/attention.py."""

    def of_heads(self, number: int, count: int) -> "Scores":
        """Scores of part `number` of `count` equal parts of the heads."""
        return replace(
            self, sinks=None if self.sinks is None else self.sinks.chunk(count)[number]
        )

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernels compute them."""
        return self.cap is None and self.sinks is None


class SplitAttention(Protocol):
    """Attention of rows that are spread over ranks: models/context/ has it."""

    @property
    def degree(self) -> int:
        """The number of ranks that share a row."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scores: Scores
    ) -> Tensor:
        """`attend` for this rank's positions, with the `ends` of whole rows."""


class _Batch(NamedTuple):
    rows: MicroBatch
    split: SplitAttention | None


_batches: list[_Batch] = []
"""The batches being computed, the innermost last. Empty if unknown."""


def register() -> None:
    """Make transformers offer `IMPLEMENTATION`, and ask here which documents a batch has and
    whether a kernel takes grouped heads. The second call changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    masking_utils.find_packed_sequence_indices = _documents
    sdpa_attention.use_gqa_in_sdpa = takes_grouped_heads


def takes_grouped_heads(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
    """Whether attention gets grouped key heads, or repeated ones.

    On CUDA only the flash kernel supports grouped heads, and only in 16 bits. In fp32 torch
    would use plain products, which keep all scores [batch, heads, sequence, sequence].
    """
    if key.is_cuda and key.dtype == torch.float32:
        return False
    return bool(_takes_grouped_heads(mask, key, value))


@contextmanager
def of(batch: MicroBatch, split: SplitAttention | None = None) -> Iterator[None]:
    """Context in which models isolate the documents of `batch`, whose rows are whole. With
    `split`, the model is given only this rank's part of them.

    transformers would derive them from the positions, which makes the host wait for the GPU.
    """
    _batches.append(_Batch(batch, split))
    try:
        yield
    finally:
        _batches.pop()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    scores: Scores,
) -> Tensor:
    """Causal attention inside each document: [batch, sequence, heads, size], keys and values of
    [batch, their sequence, groups, size] → [batch, sequence, heads, size of values].

    `query_ends`, `key_ends`: as `MicroBatch.ends`, equally many. Of a document that has more
    keys than queries, the last query sees the last key (a mask aligned bottom-right). Raises
    BackendUnavailable where torch has no such kernel.
    """
    lengths = query.shape[1], key.shape[1]
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    within = _by_lengths if query.is_cuda else _one_by_one
    found = within(q, k, v, (query_ends, key_ends), lengths, scores)
    return found.view(*query.shape[:3], value.shape[-1])


def band(
    length: int, window: int | None, device: torch.device, keys: int | None = None
) -> Tensor:
    """bool [length, keys]: the keys that each query sees. These are its own, and `window`
    previous ones or all. The last query is that of the last key."""
    keys = length if keys is None else keys
    place = torch.arange(keys, device=device)
    return sees(place[keys - length :, None] - place, window)


def sees(distance: Tensor, window: int | None) -> Tensor:
    """Whether a query sees a key so many positions before it."""
    before = distance >= 0
    return before if window is None else before & (distance <= window)


def _by_lengths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    lengths: tuple[int, int],
    scores: Scores,
) -> Tensor:
    """torch's kernel, which has one size for queries, keys and values, a multiple of 8.
    `lengths` are only bounds: to know the longest document, the host would wait."""
    if not scores.fused:
        raise BackendUnavailable(
            f"torch {torch.__version__}: no kernel for documents takes sinks or capped scores",
            fix="set parallel.context to 1 and kernels.attention to eager",
        )
    window, scale = scores.window, scores.scale
    if torch.is_autocast_enabled("cuda"):  # which has no rule for this kernel
        query, key, value = (
            x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value)
        )
    size, own = query.shape[-1], value.shape[-1]
    width = -(-max(size, own) // _WIDTHS) * _WIDTHS
    scale = size**-0.5 if scale is None else scale
    left = -1 if window is None else window
    options: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
    if key.shape[1] != query.shape[1]:
        if _HAS_GROUPS:
            options["enable_gqa"] = True
        else:
            times = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    # `pad` copies also with nothing to add: of gathered keys, each run would keep a copy.
    q, k, v = (
        x if x.shape[-1] == width and x.is_contiguous() else pad(x, (0, width - x.shape[-1]))
        for x in (query, key, value)
    )
    found = varlen_attn(q, k, v, *ends, *lengths, **options)
    assert isinstance(found, Tensor)
    return found[..., :own].contiguous()


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    _: tuple[int, int],
    scores: Scores,
) -> Tensor:
    found = []
    for (first, last), (begin, end) in zip(*(pairwise(x.tolist()) for x in ends), strict=True):
        if first == last:  # of the document, this rank has no query
            continue
        if scores.window is not None:  # no query sees what is before
            begin = max(begin, end - (last - first) - scores.window)
        q = query[first:last].transpose(0, 1)[None]
        k, v = (x[begin:end].transpose(0, 1)[None] for x in (key, value))
        found.append(_document(q, k, v, scores))
    return torch.cat(found, dim=2)[0].transpose(0, 1)


def _document(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """[1, heads, queries, size] and keys and values of [1, groups, keys, size] of one."""
    queries, keys, window = q.shape[2], k.shape[2], scores.window
    mask = None
    if queries != keys or (window is not None and window + 1 < keys) or not scores.fused:
        mask = band(queries, window, q.device, keys)
    if not scores.fused:
        return products(q, k, v, mask, scores)
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scores.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scores: Scores,
    random: float = 0.0,
) -> Tensor:
    """Attention by matrix products, with transformers' fp32 softmax, for what no fused kernel
    does. `q` is [batch, heads, sequence, size], `k` and `v` are [batch, groups, …]. Returns
    [batch, heads, sequence, size of values]. `mask`: bool, or a term added to the scores.
    `random`: the share of weights that dropout removes."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weights = q @ k.mT * (q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.cap is not None:
        weights = torch.tanh(weights / scores.cap) * scores.cap
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        weights = weights + mask
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    if scores.sinks is not None:
        sinks = scores.sinks.to(weights.dtype)[:, None, None].expand(*weights.shape[:3], 1)
        weights = torch.cat([weights, sinks], dim=-1)
    weights = weights.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype)
    return dropout(weights, random) @ v


class _Rows(NamedTuple):
    """The mask argument of transformers' layers. It is passed and not kept as state, because a
    recomputed layer needs that of its own micro batch."""

    ends: Tensor
    window: int | None
    split: SplitAttention | None


def _attention(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Rows,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The attention that transformers' layers call, with [batch, heads, sequence, size]
    each."""
    assert not dropout, "the plan chooses another kernel"
    if lost := [name for name in _INPUTS if options.get(name) is not None]:
        raise TypeError(f"{type(layer).__name__} attends with {lost[0]}, too")
    ends, window, split = attention_mask
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = Scores(scaling, window, softcap, s_aux)
    if split is None:
        return attend(q, k, v, ends, ends, scores).contiguous(), None
    return split.attend(q, k, v, ends, scores).contiguous(), None


def _mask(
    batch_size: int,
    q_length: int,
    device: torch.device,
    local_size: int | None = None,
    **_: object,
) -> _Rows:
    """`ends`, and how many previous positions a query sees. Not every layer states its window
    itself. transformers' counts the query's own position."""
    window = None if local_size is None else local_size - 1
    batch, split = _batches[-1] if _batches else (None, None)
    ends = batch.ends if batch is not None else None
    if batch is not None and split is not None:
        q_length *= split.degree
        assert q_length == batch.labels.shape[1], "the model was not given this rank's part"
    if ends is None:
        rows = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        ends = rows * q_length
    return _Rows(ends, window, split)


def _documents(position_ids: Tensor) -> Tensor | None:
    """[batch, sequence], equal numbers in one document. None where each row is one, or where
    `_mask` alone knows."""
    if _batches:
        batch, split = _batches[-1]
        return batch.segments if split is None else None
    found: Tensor | None = _find_documents(position_ids)
    return found
