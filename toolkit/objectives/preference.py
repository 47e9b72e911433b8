"""Common parts of the objectives on pairs of a preferred and a rejected answer.

Rows 2i (chosen) and 2i + 1 (rejected) of a micro batch are a pair. Metrics have TRL's names and
are means over the pairs of the global batch.
"""

from typing import TYPE_CHECKING

from toolkit.batch import MicroBatch
from toolkit.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor


class PairObjective(Objective):
    """Counts pairs. A pair without a trained token is padding and is not counted."""

    data_kinds = ("preference",)
    rows_per_sample = 2
    metrics: tuple[str, ...] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )

    def count(self, batch: MicroBatch) -> "Tensor":
        """See `Objective.count`: the pairs."""
        return counted(batch).sum()


def split(values: "Tensor") -> tuple["Tensor", "Tensor"]:
    """[rows] → those of the chosen and those of the rejected answers, [pairs] each."""
    return values[0::2], values[1::2]


def counted(batch: MicroBatch) -> "Tensor":
    """bool [pairs]: the pairs of which any token is trained."""
    chosen, rejected = split(batch.trained.any(dim=1))
    return chosen | rejected


def mean_log_probs(log_probs: "Tensor", batch: MicroBatch) -> "Tensor":
    """Mean log p of the trained tokens of each row, float64 [rows]; 0 for a row without any."""
    return log_probs.double().sum(dim=1) / lengths(batch)


def lengths(batch: MicroBatch) -> "Tensor":
    """Trained tokens of each row, at least 1: int64 [rows]."""
    return batch.trained.sum(dim=1).clamp(min=1)


def rewards(chosen: "Tensor", rejected: "Tensor") -> dict[str, "Tensor"]:
    """Metrics of each pair, [pairs], from its rewards."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": chosen > rejected,
        "rewards/margins": chosen - rejected,
    }


def summed(values: dict[str, "Tensor"], batch: MicroBatch) -> dict[str, "Tensor"]:
    """The sum of each metric over the pairs that count."""
    kept = counted(batch)
    return {name: (value.detach().double() * kept).sum() for name, value in values.items()}
