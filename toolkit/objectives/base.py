"""The base of all objectives, which compute a loss from the log-probabilities of the labels,
and `pretrain` and `sft`: the mean cross entropy of the labels.

The loss of a step is the sum of `loss` over all micro batches of all ranks, divided by the
sum of `count`, the global count: neither the number of ranks nor the split into micro batches
changes it. Engines compute the log-probabilities and know nothing else about the objective.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.batch import MicroBatch


@dataclass(frozen=True)
class LossTerms:
    """What one micro batch adds to the numerators of loss and metrics."""

    loss: "Tensor"
    """Scalar with autograd graph, summed and not yet divided."""
    metrics: Mapping[str, "Tensor"] = field(default_factory=dict)
    """Scalars under the names of `Objective.metrics`, summed like the loss."""


class Objective(ABC):
    """An objective. Created with the settings of the recipe's section of its name, if there is
    one, as keyword arguments. Stateless."""

    reads: tuple[str, ...] = ()
    """Optional inputs that it needs: fields of `MicroBatch`, or names in its `extra`."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics logged in addition to the loss, each also divided by the global
    count."""
    data_kinds: tuple[str, ...] = ()
    """Values of `data.train.kind` that it trains on. Empty: any."""
    blended_kinds: tuple[str, ...] = ()
    """Kinds that a list of sources may also have."""
    rows_per_sample = 1
    """Rows of a micro batch that make one sample: 2 where it is a pair."""

    @abstractmethod
    def count(self, batch: "MicroBatch") -> "Tensor":
        """This micro batch's part of the global count (tokens, pairs): a scalar, ≥ 0."""

    @abstractmethod
    def loss(self, log_probs: "Tensor", batch: "MicroBatch") -> LossTerms:
        """Summed loss and metrics of a micro batch.

        `log_probs` is fp32 [micro_batch, sequence]: log p(label), 0 where the label is
        `IGNORE_INDEX`. Log-probabilities and batch are on one device.
        """


def check_batch(objective: Objective, batch: "MicroBatch") -> None:
    """Raise DataError if the batch lacks an input of the objective."""
    missing = [
        name
        for name in objective.reads
        if getattr(batch, name, None) is None and name not in batch.extra
    ]
    if missing:
        raise DataError(
            f"the objective {type(objective).__name__} reads {', '.join(missing)}, which the "
            "training data does not provide",
            fix="set training.objective to pretrain, or choose data with these fields",
        )


class Pretrain(Objective):
    """Mean cross entropy (nats) over the unmasked tokens of the global batch."""

    data_kinds: tuple[str, ...] = ("text", "hf", "megatron")

    def count(self, batch: "MicroBatch") -> "Tensor":
        """See `Objective.count`: the unmasked tokens."""
        return batch.trained.sum()

    def loss(self, log_probs: "Tensor", batch: "MicroBatch") -> LossTerms:
        """See `Objective.loss`."""
        del batch
        # In fp64 the sum does not depend on how tokens are divided into micro batches.
        return LossTerms(-log_probs.double().sum())


class Sft(Pretrain):
    """Supervised fine-tuning: the loss of `Pretrain` on the trained tokens of conversations.
    Chat data chooses these tokens. All tokens of plain text that is blended in are trained."""

    data_kinds = ("chat",)
    blended_kinds = Pretrain.data_kinds
