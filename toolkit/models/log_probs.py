"""Logits → log-probability of each label: the cross entropy of models with whole logits.

megatron-core has its own for logits whose vocabulary is split over ranks.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from toolkit.batch import IGNORE_INDEX


def label_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """log p(label) in fp32 [rows, sequence], 0 where the label is `IGNORE_INDEX`.

    `logits` is [rows, sequence, vocabulary].
    """
    losses = cross_entropy(
        logits.float().flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return -losses.view_as(labels)


def in_chunks(
    compute: Callable[[Tensor], Tensor], length: int, chunks: int, device: torch.device
) -> Tensor:
    """The values of `compute` for the positions 0 … `length` - 1, [rows, length].

    It is called with a chunk of positions, int64 [n] on `device`, and again in the backward
    pass: only the logits of one chunk are in memory.
    """
    places = torch.arange(length, device=device).chunk(chunks)
    again = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(chunk) for chunk in places], dim=1)
