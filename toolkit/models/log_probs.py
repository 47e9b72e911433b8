"""Logits → log-probability of each label: the cross entropy of models with whole logits.

megatron-core has its own for logits whose vocabulary is split over ranks.
"""

from torch import Tensor
from torch.nn.functional import cross_entropy

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
