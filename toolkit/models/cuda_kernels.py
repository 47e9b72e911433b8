"""Replaces a function of transformers that would use too much memory on CUDA.

transformers decides on insufficient information (5.23, torch 2.13): its function is replaced by
one with more, which otherwise calls the original.
"""

import torch
from torch import Tensor
from transformers.integrations import sdpa_attention

_grouped_heads = sdpa_attention.use_gqa_in_sdpa


def choose() -> None:
    """Replace it; the second call changes nothing."""
    sdpa_attention.use_gqa_in_sdpa = takes_grouped_heads


def takes_grouped_heads(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
    """Whether attention gets grouped key heads, or repeated ones.

    On CUDA only the flash kernel supports grouped heads, and only in 16 bits: in fp32 torch
    would fall back to plain products, which keep all scores [batch, heads, sequence, sequence].
    """
    if key.is_cuda and key.dtype == torch.float32:
        return False
    return bool(_grouped_heads(mask, key, value))
