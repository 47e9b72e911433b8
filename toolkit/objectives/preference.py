"""Objectives `dpo` and `orpo`, on pairs of a preferred and a rejected answer.

Rows 2i (chosen) and 2i + 1 (rejected) of a micro batch are a pair. Loss and metrics, which have
TRL's names, are means over the pairs of the global batch.
"""

from typing import TYPE_CHECKING, Literal

from toolkit.batch import MicroBatch, row_log_probs
from toolkit.objectives.base import LossTerms, Objective

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE = "reference_log_probs"
"""Name in `MicroBatch.extra`: log p of a row's trained tokens under the reference model."""
_LARGEST_LOG_PROB = -(2.0**-24)
"""fp32 has no probability between this and 1, whose odds are infinite."""


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
        return _counted(batch).sum()


class Dpo(PairObjective):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290); a reward is β times
    the log ratio.

    With the log ratio r = log p(answer) - log p_reference(answer) of the chosen answer y and
    the rejected answer z, and d = r(y) - r(z), the loss of a pair is

    - `sigmoid`: -log σ(β d), equation 7; with label smoothing ε,
      -(1 - ε) log σ(β d) - ε log σ(-β d) (Mitchell 2023, https://ericmitchell.ai/cdpo.pdf),
    - `hinge`: max(0, 1 - β d) (SLiC, as in Liu et al., arXiv:2309.06657),
    - `ipo`: (r(y) / |y| - r(z) / |z| - 1 / (2β))² (Azar et al., arXiv:2310.12036, equation 17;
      the division by the answers' lengths is TRL's, which its authors confirmed).

    `sft_weight` adds that multiple of the chosen answer's cross entropy per token (Pang et al.,
    arXiv:2404.19733, equation 1).
    """

    reads = (REFERENCE,)

    def __init__(
        self,
        loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        sft_weight: float = 0.0,
    ) -> None:
        self._loss = loss
        self._beta = beta
        self._label_smoothing = label_smoothing
        self._sft_weight = sft_weight

    def loss(self, log_probs: "Tensor", batch: MicroBatch) -> LossTerms:
        """See `Objective.loss`."""
        policy = row_log_probs(log_probs)
        ratios = (policy - batch.extra[REFERENCE]).double()
        losses = self._losses(ratios, batch)
        if self._sft_weight:
            losses = losses - self._sft_weight * _means(log_probs, batch)[0::2]
        return _terms(batch, losses, self._beta * ratios, policy)

    def _losses(self, ratios: "Tensor", batch: MicroBatch) -> "Tensor":
        """The loss of each pair, [pairs], from the log ratios of its rows."""
        from torch.nn.functional import logsigmoid, relu

        if self._loss == "ipo":
            ratios = ratios / _lengths(batch)
            return (ratios[0::2] - ratios[1::2] - 1 / (2 * self._beta)).square()
        margins = self._beta * (ratios[0::2] - ratios[1::2])
        if self._loss == "hinge":
            return relu(1 - margins)
        smoothing = self._label_smoothing
        return -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)


class Orpo(PairObjective):
    """Odds ratio preference optimization (Hong et al., arXiv:2403.07691), which needs no
    reference model. A reward is β times the mean log p.

    With p(y) = exp(mean log p of the tokens of the answer y), equation 3, and
    odds(y) = p(y) / (1 - p(y)), the loss of a pair is the cross entropy per token of the
    chosen answer, minus β log σ(log(odds(chosen) / odds(rejected))): equations 6 and 7, which
    call β λ.
    """

    metrics = (*PairObjective.metrics, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    def __init__(self, beta: float = 0.1) -> None:
        self._beta = beta

    def loss(self, log_probs: "Tensor", batch: MicroBatch) -> LossTerms:
        """See `Objective.loss`."""
        from torch.nn.functional import logsigmoid

        means = _means(log_probs, batch)
        # log(p / (1 - p)) by `expm1`: 1 - exp(log p) loses all digits where p is close to 1.
        log_p = means.clamp(max=_LARGEST_LOG_PROB)
        odds = log_p - (-log_p.expm1()).log()
        log_odds = odds[0::2] - odds[1::2]
        ratio, nll = logsigmoid(log_odds), -means[0::2]
        more = {"nll_loss": nll, "log_odds_ratio": ratio, "log_odds_chosen": log_odds}
        return _terms(batch, nll - self._beta * ratio, self._beta * means, means, **more)


def _terms(
    batch: MicroBatch,
    losses: "Tensor",
    rewards: "Tensor",
    log_probs: "Tensor",
    **more: "Tensor",
) -> LossTerms:
    """Sums over the pairs that count. `losses` and `more` are per pair, the others per row."""
    chosen, rejected = rewards[0::2], rewards[1::2]
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": chosen > rejected,
        "rewards/margins": chosen - rejected,
        "logps/chosen": log_probs[0::2],
        "logps/rejected": log_probs[1::2],
        **more,
    }
    kept = _counted(batch)
    metrics = {name: (one.detach().double() * kept).sum() for name, one in values.items()}
    return LossTerms((losses * kept).sum(), metrics)


def _counted(batch: MicroBatch) -> "Tensor":
    """bool [pairs]: the pairs of which any token is trained."""
    trained = batch.trained.any(dim=1)
    return trained[0::2] | trained[1::2]


def _means(log_probs: "Tensor", batch: MicroBatch) -> "Tensor":
    """Mean log p of the trained tokens of each row, float64 [rows]. 0 for a row without any."""
    return log_probs.double().sum(dim=1) / _lengths(batch)


def _lengths(batch: MicroBatch) -> "Tensor":
    """Trained tokens of each row, at least 1: int64 [rows]."""
    return batch.trained.sum(dim=1).clamp(min=1)
