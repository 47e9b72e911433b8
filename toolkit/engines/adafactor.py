"""Adafactor: second moments of matrices as one average per row and one per column.

With the gradient G of a matrix [m, n] of the Hugging Face checkpoint, step t does

    β ← 1 - t^-decay
    R ← β R + (1 - β) mean over columns of (G² + ε)       [m]
    C ← β C + (1 - β) mean over rows of (G² + ε)          [n]
    U ← G / √(R Cᵀ / mean(R)),  U ← U / max(1, RMS(U) / clip),  W ← W - lr·λ W - lr·U

A vector has V ← β V + (1 - β) (G² + ε) and U ← G / √V instead. This is Adafactor
(arXiv:1804.04235, algorithms 4 and 5) as transformers computes it with `scale_parameter=False`
and `relative_step=False`: the learning rate is the schedule's, and there is no momentum.
"""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.models.families.tensors import Block
from toolkit.recipe.schema import OptimizerSection


class Adafactor:
    """See `UpdateRule`; every tensor is updated as a whole, and its owner keeps all states."""

    moments: ClassVar[tuple[str, ...]] = ()
    sent: ClassVar[torch.dtype] = torch.float32
    by_replicas: ClassVar[bool] = True

    def __init__(self, settings: OptimizerSection) -> None:
        self.settings = settings.adafactor_settings
        self.states: dict[str, dict[str, Tensor]] = {}

    def takes(self, block: Block) -> bool:  # noqa: ARG002
        """See `UpdateRule.takes`."""
        return True

    def cost(self, shape: tuple[int, ...]) -> int:
        """See `UpdateRule.cost`."""
        return prod(shape)

    def own(self, tensor: str, shape: tuple[int, ...], device: torch.device) -> None:
        """See `UpdateRule.own`."""
        names = ("exp_avg_sq_row", "exp_avg_sq_col") if len(shape) > 1 else ("exp_avg_sq",)
        self.states[tensor] = {
            name: torch.zeros(size, device=device)
            for name, size in zip(names, shape, strict=True)
        }

    def accumulate(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """See `UpdateRule.accumulate`: nothing."""

    def update(self, tensor: str, whole: Tensor, step: int) -> Tensor:
        """See `UpdateRule.update`."""
        new = step**-self.settings.decay
        square = whole.square().add_(self.settings.eps)
        state = self.states[tensor]
        if whole.ndim == 1:
            update = state["exp_avg_sq"].lerp_(square, new).rsqrt().mul_(whole)
        else:
            rows = state["exp_avg_sq_row"].lerp_(square.mean(1), new)
            columns = state["exp_avg_sq_col"].lerp_(square.mean(0), new)
            update = torch.outer((rows / rows.mean()).rsqrt(), columns.rsqrt()).mul_(whole)
        size = update.norm() / update.numel() ** 0.5
        return update.div_((size / self.settings.clip).clamp(min=1.0))

    def rate(self, shape: tuple[int, ...]) -> float:  # noqa: ARG002
        """See `UpdateRule.rate`."""
        return 1.0
