"""Adafactor's update: second moments of matrices as one average per row and one per column.

With the gradient G of a matrix [m, n] of the Hugging Face checkpoint, step t does

    β ← 1 - t^-decay
    R ← β R + (1 - β) mean over columns of (G² + ε)       [m]
    C ← β C + (1 - β) mean over rows of (G² + ε)          [n]
    U ← G / √(R Cᵀ / mean(R)),  U ← U / max(1, RMS(U) / clip),  W ← W - lr·λ W - lr·U

A vector has V ← β V + (1 - β) (G² + ε) and U ← G / √V instead. This is Adafactor
(arXiv:1804.04235, algorithms 4 and 5) as transformers computes it with `scale_parameter=False`
and `relative_step=False`: the learning rate is the schedule's, and there is no momentum.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toolkit.engines.owners import UpdateRule
from toolkit.optimizers.base import Trained
from toolkit.recipe.schema import OptimizerSection


class Adafactor(UpdateRule):
    """The owner of a tensor keeps its averages."""

    def update(self, whole: Tensor, states: Mapping[str, Tensor], step: int) -> Tensor:
        new = step**-self.own.decay
        square = whole.square().add_(self.own.eps)
        if whole.ndim == 1:
            update = states["exp_avg_sq"].lerp_(square, new).rsqrt().mul_(whole)
        else:
            rows = states["exp_avg_sq_row"].lerp_(square.mean(1), new)
            columns = states["exp_avg_sq_col"].lerp_(square.mean(0), new)
            update = torch.outer((rows / rows.mean()).rsqrt(), columns.rsqrt()).mul_(whole)
        size = update.norm() / update.numel() ** 0.5
        return update.div_((size / self.own.clip).clamp(min=1.0))


def reference(
    settings: OptimizerSection, parameters: Sequence[Trained]
) -> list[torch.optim.Optimizer]:
    """transformers' own."""
    from transformers.optimization import Adafactor as Transformers

    own = settings.own
    optimizer = Transformers(
        [parameter.group for parameter in parameters],
        scale_parameter=False,
        relative_step=False,
        decay_rate=-own.decay,
        eps=(own.eps, 0.0),
        clip_threshold=own.clip,
    )
    return [optimizer]
