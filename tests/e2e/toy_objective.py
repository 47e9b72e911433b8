"""An objective of another package: the summed cross entropy of a sequence, averaged."""

import torch
from torch import Tensor

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.objectives.base import LossTerms, Objective


class Toy(Objective):
    """Counts sequences in place of tokens, and logs how many tokens one has."""

    metrics = ("tokens_per_sequence",)

    def count(self, batch: MicroBatch) -> Tensor:
        return (batch.labels != IGNORE_INDEX).any(dim=1).sum()

    def loss(self, log_probs: Tensor, batch: MicroBatch) -> LossTerms:
        tokens = (batch.labels != IGNORE_INDEX).sum()
        return LossTerms(-log_probs.sum(), {"tokens_per_sequence": tokens})


class Demanding(Toy):
    """Reads what no data provides."""

    reads = ("margins", "rewards")


class Unordered(Toy):
    """Uses an operator whose result depends on which of several writes comes last."""

    def loss(self, log_probs: Tensor, batch: MicroBatch) -> LossTerms:
        written = torch.zeros(1).put_(torch.tensor([0, 0]), torch.ones(2))
        terms = super().loss(log_probs, batch)
        return LossTerms(terms.loss * written.sum(), terms.metrics)
