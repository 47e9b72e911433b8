"""Muon: momentum, orthogonalised, as the update of every matrix inside a decoder layer.

With momentum M and gradient G of a matrix [m, n] of the Hugging Face checkpoint, a step does

    M ← μ M + (1 - μ) G,  U ← NS(μ M + (1 - μ) G),  W ← W - lr·λ W - lr·a(m, n) U

as `torch.optim.Muon` does (Keller Jordan, https://kellerjordan.github.io/posts/muon).
Everything except the Newton-Schulz iteration NS is elementwise. NS starts by rounding to bf16
and ends in bf16, so sending bf16 is lossless.
"""

from collections.abc import Mapping
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.checkpoint.shards import block_shape
from toolkit.models.families.tensors import Block
from toolkit.models.matrices import is_layer_matrix, newton_schulz_flops
from toolkit.recipe.schema import OptimizerSection

A, B, C = 3.4445, -4.7750, 2.0315
"""The iteration's coefficients: x ← A x + (B G + C G²) x with G = x xᵀ."""


class Muon:
    """See `UpdateRule`; AdamW updates embeddings, head, norms and biases."""

    states: ClassVar[Mapping[str, Mapping[str, Tensor]]] = {}
    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    sent: ClassVar[torch.dtype] = torch.bfloat16
    by_replicas: ClassVar[bool] = False

    def __init__(self, settings: OptimizerSection) -> None:
        self.settings = settings.muon_settings

    def takes(self, block: Block) -> bool:
        """See `UpdateRule.takes`."""
        return is_layer_matrix(block.tensor, len(block_shape(block)))

    def cost(self, shape: tuple[int, ...]) -> int:
        """See `UpdateRule.cost`."""
        return newton_schulz_flops(shape, self.settings.ns_steps)

    def own(self, tensor: str, shape: tuple[int, ...], device: torch.device) -> None:
        """See `UpdateRule.own`: nothing."""

    def accumulate(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """See `UpdateRule.accumulate`."""
        average = state["exp_avg"]
        average.lerp_(gradient, 1 - self.settings.momentum)
        if self.settings.nesterov:
            gradient.lerp_(average, self.settings.momentum)
        else:
            gradient.copy_(average)

    def update(self, tensor: str, whole: Tensor, step: int) -> Tensor:  # noqa: ARG002
        """See `UpdateRule.update`."""
        return newton_schulz(whole, self.settings.ns_steps)

    def rate(self, shape: tuple[int, ...]) -> float:
        """See `UpdateRule.rate`; depends on `adjust_lr`."""
        rows, columns = shape
        if self.settings.adjust_lr == "original":
            return sqrt(max(1, rows / columns))
        return 0.2 * sqrt(max(rows, columns))


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """The matrix [m, n] with singular values near 1, in bf16: bitwise what `torch.optim.Muon`
    computes; torch's own function is private and may change."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x
