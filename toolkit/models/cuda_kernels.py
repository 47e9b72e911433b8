"""What transformers' models would compute slowly, with too much memory or with waits on CUDA.

Two of transformers' functions decide by less than they would have to (5.23, torch 2.13). Each
is replaced by one that knows more, and otherwise asks the original.
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
"""The segments of the batch that a model computes now, where we know them."""


def choose() -> None:
    """Replace them; the second call changes nothing."""
    sdpa_attention.use_gqa_in_sdpa = takes_grouped_heads
    masking_utils.find_packed_sequence_indices = _documents


def takes_grouped_heads(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
    """Whether attention gets fewer heads of keys than of queries, or repeated ones.

    On CUDA only the flash kernel takes fewer, and that computes in 16 bits: in fp32 torch would
    fall back to plain products, which keep all scores [batch, heads, sequence, sequence].
    """
    if key.is_cuda and key.dtype == torch.float32:
        return False
    return bool(_grouped_heads(mask, key, value))


@contextmanager
def documents(segments: Tensor | None) -> Iterator[None]:
    """A block in which models isolate the documents of `segments`; None: a row is one.

    transformers would look for them in the positions, and the host wait for the answer.
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
