"""What one forward pass is fed: the word that data, models and engines share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""Label of a position that carries no loss (PyTorch's and transformers' convention)."""


@dataclass(frozen=True)
class MicroBatch:
    """What one rank feeds to one forward pass."""

    input_ids: "torch.Tensor"
    """int64 [micro_batch, sequence]."""
    labels: "torch.Tensor"
    """int64 [micro_batch, sequence], already shifted: `labels[:, t]` is the token that
    follows `input_ids[:, t]`, or `IGNORE_INDEX` where no loss is taken."""
    samples: tuple[int, ...] = ()
    """Which samples of the training data the rows are; for the sample log only."""

    @property
    def tokens(self) -> int:
        """Unmasked tokens: those whose loss counts. Waits for a batch on a GPU."""
        return int((self.labels != IGNORE_INDEX).sum())
