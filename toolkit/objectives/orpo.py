"""Objective `orpo`: odds ratio preference optimization (Hong et al., arXiv:2403.07691).

With p(y) = exp(mean log p of the tokens of the answer y), equation 3, and
odds(y) = p(y) / (1 - p(y)), the loss of a pair is the cross entropy per token of the chosen
answer, minus β log σ(log(odds(chosen) / odds(rejected))): equations 6 and 7, which call β λ.
No reference model is needed.
"""

from typing import TYPE_CHECKING

from toolkit.batch import MicroBatch
from toolkit.objectives import preference
from toolkit.objectives.base import LossTerms

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_LOG_PROB = -(2.0**-24)
"""fp32 has no probability between this and 1, whose odds are infinite."""


class Orpo(preference.PairObjective):
    """Mean loss over the pairs of the global batch; a reward is β times the mean log p."""

    metrics = (
        *preference.PairObjective.metrics,
        "nll_loss",
        "log_odds_ratio",
        "log_odds_chosen",
    )

    def __init__(self, beta: float = 0.1) -> None:
        self._beta = beta

    def loss(self, log_probs: "Tensor", batch: MicroBatch) -> LossTerms:
        """See `Objective.loss`."""
        from torch.nn.functional import logsigmoid

        means = preference.mean_log_probs(log_probs, batch)
        chosen, rejected = preference.split(means)
        odds_chosen, odds_rejected = preference.split(_log_odds(means))
        log_odds = odds_chosen - odds_rejected
        ratio = logsigmoid(log_odds)
        values = {
            **preference.rewards(self._beta * chosen, self._beta * rejected),
            "logps/chosen": chosen,
            "logps/rejected": rejected,
            "nll_loss": -chosen,
            "log_odds_ratio": ratio,
            "log_odds_chosen": log_odds,
        }
        losses = (-chosen - self._beta * ratio) * preference.counted(batch)
        return LossTerms(losses.sum(), preference.summed(values, batch))


def _log_odds(log_p: "Tensor") -> "Tensor":
    """log(p / (1 - p)). By `expm1`: 1 - exp(log p) loses all digits where p is close to 1."""
    log_p = log_p.clamp(max=_LARGEST_LOG_PROB)
    return log_p - (-log_p.expm1()).log()
