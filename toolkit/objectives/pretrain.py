"""Objectives `pretrain` and `sft`: the mean cross entropy of the labels."""

from typing import TYPE_CHECKING

from toolkit.batch import MicroBatch
from toolkit.objectives.base import LossTerms, Objective

if TYPE_CHECKING:
    from torch import Tensor


class Pretrain(Objective):
    """Mean cross entropy (nats) over the unmasked tokens of the global batch.

    With `loss_weights` it is the weighted mean: the sum of weight times cross entropy over the
    sum of the weights, both over the unmasked tokens.
    """

    data_kinds: tuple[str, ...] = ("text", "hf", "megatron")

    def count(self, batch: MicroBatch) -> "Tensor":
        """See `Objective.count`: the unmasked tokens, or the sum of their weights."""
        if batch.loss_weights is not None:
            return (batch.loss_weights * batch.trained).double().sum()
        return batch.trained.sum()

    def loss(self, log_probs: "Tensor", batch: MicroBatch) -> LossTerms:
        """See `Objective.loss`."""
        if batch.loss_weights is not None:
            log_probs = log_probs * batch.loss_weights
        # In fp64 the sum does not depend on how tokens are divided into micro batches.
        return LossTerms(-log_probs.double().sum())


class Sft(Pretrain):
    """Supervised fine-tuning: the same on the trained tokens of conversations, which chat data
    chooses. Of documents in the same list, all are trained."""

    data_kinds = ("chat",)
    blended_kinds = Pretrain.data_kinds
