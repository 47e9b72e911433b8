"""Objective `dpo`: direct preference optimization (Rafailov et al., arXiv:2305.18290).

With the log ratio r = log p(answer) - log p_reference(answer) of the chosen answer y and the
rejected answer z, and d = r(y) - r(z), the loss of a pair is

- `sigmoid`: -log σ(β d), equation 7; with label smoothing ε,
  -(1 - ε) log σ(β d) - ε log σ(-β d) (Mitchell 2023, https://ericmitchell.ai/cdpo.pdf),
- `hinge`: max(0, 1 - β d) (SLiC, as in Liu et al., arXiv:2309.06657),
- `ipo`: (r(y) / |y| - r(z) / |z| - 1 / (2β))² (Azar et al., arXiv:2310.12036, equation 17; the
  division by the answers' lengths is TRL's, which its authors confirmed).

`sft_weight` adds that multiple of the chosen answer's cross entropy per token (Pang et al.,
arXiv:2404.19733, equation 1). The loss is the mean over the pairs of the global batch.
"""

from typing import TYPE_CHECKING, Literal

from toolkit.batch import MicroBatch, row_log_probs
from toolkit.objectives import preference
from toolkit.objectives.base import LossTerms

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE = "reference_log_probs"
"""Name in `MicroBatch.extra`: log p of a row's trained tokens under the reference model."""


class Dpo(preference.PairObjective):
    """Mean loss over the pairs of the global batch; a reward is β times the log ratio."""

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
            chosen, _ = preference.split(preference.mean_log_probs(log_probs, batch))
            losses = losses - self._sft_weight * chosen
        logps = zip(("logps/chosen", "logps/rejected"), preference.split(policy), strict=True)
        values = {**preference.rewards(*preference.split(self._beta * ratios)), **dict(logps)}
        kept = losses * preference.counted(batch)
        return LossTerms(kept.sum(), preference.summed(values, batch))

    def _losses(self, ratios: "Tensor", batch: MicroBatch) -> "Tensor":
        """The loss of each pair, [pairs], from the log ratios of its rows."""
        from torch.nn.functional import logsigmoid, relu

        if self._loss == "ipo":
            chosen, rejected = preference.split(ratios / preference.lengths(batch))
            return (chosen - rejected - 1 / (2 * self._beta)).square()
        chosen, rejected = preference.split(ratios)
        margins = self._beta * (chosen - rejected)
        if self._loss == "hinge":
            return relu(1 - margins)
        smoothing = self._label_smoothing
        return -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
