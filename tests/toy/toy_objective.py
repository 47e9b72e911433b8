"""An objective of another package: the summed cross entropy of a sequence, averaged."""

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
