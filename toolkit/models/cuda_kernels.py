"""Replaces functions of transformers that would be slow, use too much memory or synchronise on
CUDA.

Two of transformers' functions decide on insufficient information (5.23, torch 2.13). Each is
replaced by one with more information, which otherwise calls the original.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.integrations import sdpa_attention

_grouped_heads = sdpa_attention.use_gqa_in_sdpa
_find_documents = masking_utils.find_packed_sequence_indices
_known: list[Tensor | None] = []
"""The segments of the model's current batch, if known."""


def choose() -> None:
    """Replace them; the second call changes nothing."""
    sdpa_attention.use_gqa_in_sdpa = takes_grouped_heads
    masking_utils.find_packed_sequence_indices = _documents


def takes_grouped_heads(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
    """Whether attention gets grouped key heads, or repeated ones.

    On CUDA only the flash kernel supports grouped heads, and only in 16 bits: in fp32 torch
    would fall back to plain products, which keep all scores [batch, heads, sequence, sequence].
    """
    if key.is_cuda and key.dtype == torch.float32:
        return False
    return bool(_grouped_heads(mask, key, value))


@contextmanager
def documents(segments: Tensor | None) -> Iterator[None]:
    """Context in which models isolate the documents of `segments`; None: a row is one document.

    transformers would derive them from the positions, which makes the host wait for the GPU.
    """
    _known.append(segments)
    try:
        yield
    finally:
        _known.pop()


def _documents(position_ids: Tensor) -> Tensor | None:
    """[batch, sequence], equal numbers in one document; None where each row is one."""
    if _known:
        return _known[-1]
    found: Tensor | None = _find_documents(position_ids)
    return found
