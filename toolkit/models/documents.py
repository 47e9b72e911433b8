"""Attention inside documents of different lengths that share the rows of a micro batch.

On CUDA by torch's kernel for such lengths, whose time grows with the documents and not with the
square of the row; on CPUs one document after the other. Neither makes a mask: transformers and
megatron-core pass `MicroBatch.ends` to their layers in its place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from toolkit.batch import MicroBatch
from toolkit.errors import BackendUnavailable

IMPLEMENTATION = "documents"
"""Name of this attention in the config of a transformers model."""
_TAKES = frozenset(signature(varlen_attn).parameters)
"""Its arguments, which later versions of torch have more of."""
_WIDTHS = 8
"""FlashAttention's head sizes are multiples of it."""
_find_documents = masking_utils.find_packed_sequence_indices
_batches: list[MicroBatch] = []
"""What the model computes now, if that is known."""


def register() -> None:
    """Make transformers offer `IMPLEMENTATION`, and ask here which documents a batch has; the
    second call changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    masking_utils.find_packed_sequence_indices = _documents


@contextmanager
def of(batch: MicroBatch) -> Iterator[None]:
    """Context in which models isolate the documents of `batch`.

    transformers would derive them from the positions, which makes the host wait for the GPU.
    """
    _batches.append(batch)
    try:
        yield
    finally:
        _batches.pop()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention inside each document: [batch, sequence, heads, size], keys and values of
    [..., groups, size] → [batch, sequence, heads, size of values].

    `ends` as in `MicroBatch`; `window`: how many previous positions a query sees, None: all.
    Raises BackendUnavailable where torch has no such kernel.
    """
    length = query.shape[1]
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    within = _by_lengths if query.is_cuda else _one_by_one
    found = within(q, k, v, ends, length, window, scale)
    return found.view(*query.shape[:3], value.shape[-1])


def band(length: int, window: int, device: torch.device) -> Tensor:
    """True where query i sees key j: i - window ≤ j ≤ i."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance <= window)


def _by_lengths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """torch's kernel, which has one size for queries, keys and values, a multiple of 8.
    `longest` is only a bound: to know the longest document, the host would wait."""
    if torch.is_autocast_enabled("cuda"):  # which has no rule for this kernel
        query, key, value = (
            x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value)
        )
    size, own = query.shape[-1], value.shape[-1]
    width = -(-max(size, own) // _WIDTHS) * _WIDTHS
    scale = size**-0.5 if scale is None else scale
    options: dict[str, Any] = {"window_size": (-1 if window is None else window, 0)}
    if "window_size" not in _TAKES:  # torch 2.10
        if window is not None:
            raise BackendUnavailable(
                f"kernels.attention varlen: torch {torch.__version__} takes no window",
                fix="use a newer torch, or set kernels.attention to sdpa",
            )
        options = {"is_causal": True}
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in _TAKES:
            options["enable_gqa"] = True
        else:
            times = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    if "scale" in _TAKES:
        options["scale"] = scale
    else:
        query = query * (scale * width**0.5)
    q, k, v = (pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    found = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
    assert isinstance(found, Tensor)
    return found[..., :own].contiguous()


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    _: int,
    window: int | None,
    scale: float | None,
) -> Tensor:
    found = []
    for begin, end in filter(lambda one: one[0] < one[1], pairwise(ends.tolist())):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        mask = None
        if window is not None and window + 1 < end - begin:
            mask = band(end - begin, window, q.device)
        found.append(
            scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=k.shape[1] != q.shape[1],
            )
        )
    return torch.cat(found, dim=2)[0].transpose(0, 1)


def _attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: tuple[Tensor, int | None],
    dropout: float = 0.0,
    scaling: float | None = None,
    **_options: object,
) -> tuple[Tensor, None]:
    """What transformers' layers call, with [batch, heads, sequence, size] each."""
    assert not dropout, "the plan chooses another kernel"
    ends, window = attention_mask
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(q, k, v, ends, window, scaling), None


def _mask(
    batch_size: int,
    q_length: int,
    device: torch.device,
    local_size: int | None = None,
    **_: object,
) -> tuple[Tensor, int | None]:
    """What transformers passes to `_attention` as the mask: `ends`, and how many previous
    positions a query sees. Not every layer states its window itself; transformers' counts the
    query's own position."""
    window = None if local_size is None else local_size - 1
    ends = _batches[-1].ends if _batches else None
    if ends is None:
        rows = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        ends = rows * q_length
    return ends, window


def _documents(position_ids: Tensor) -> Tensor | None:
    """[batch, sequence], equal numbers in one document; None where each row is one."""
    if _batches:
        return _batches[-1].segments
    found: Tensor | None = _find_documents(position_ids)
    return found
