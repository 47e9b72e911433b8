"""Muon's update: momentum, orthogonalised, of every matrix inside a decoder layer.

With momentum M and gradient G of a matrix [m, n] of the Hugging Face checkpoint, a step does

    M ← μ M + (1 - μ) G,  U ← NS(μ M + (1 - μ) G),  W ← W - lr·λ W - lr·0.2 √max(m, n) U

as `torch.optim.Muon` does (Keller Jordan, https://kellerjordan.github.io/posts/muon).
Everything except the Newton-Schulz iteration NS is elementwise. NS starts by rounding to bf16
and ends in bf16, so sending bf16 is lossless.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from toolkit.engines.owners import UpdateRule
from toolkit.optimizers.base import Trained
from toolkit.recipe.schema import OptimizerSection

MOMENTUM = 0.95
"""The decay rate μ of the momentum, torch.optim.Muon's default."""
A, B, C = 3.4445, -4.7750, 2.0315
"""The iteration's coefficients: x ← A x + (B G + C G²) x with G = x xᵀ."""
NEWTON_SCHULZ_STEPS = 5
"""Steps of the iteration, as in `torch.optim.Muon`."""


class Muon(UpdateRule):
    """AdamW updates embeddings, head, norms and biases."""

    def accumulate(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        average = state["exp_avg"]
        average.lerp_(gradient, 1 - MOMENTUM)
        gradient.lerp_(average, MOMENTUM)

    def update(self, whole: Tensor, states: Mapping[str, Tensor], step: int) -> Tensor:  # noqa: ARG002
        return newton_schulz(whole)

    def rate(self, shape: Sequence[int]) -> float:
        """Makes updates as large as AdamW's, so that rates for AdamW can be used."""
        return 0.2 * sqrt(max(shape))


def newton_schulz(matrix: Tensor) -> Tensor:
    """The matrix [m, n] with singular values near 1, in bf16: bitwise what `torch.optim.Muon`
    computes. torch's own function is private and may change."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


def reference(
    settings: OptimizerSection, parameters: Sequence[Trained]
) -> list[torch.optim.Optimizer]:
    """torch's own for the weights of linear layers inside the decoder layers, and AdamW."""
    matrices: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for parameter in parameters:
        inside = any(piece.isdecimal() for piece in parameter.name.split("."))
        kept = parameter.vector or "norm" in parameter.name or "conv" in parameter.name
        (matrices if inside and not kept else others).append(parameter.group)
    optimizers: list[torch.optim.Optimizer] = []
    if others:
        optimizers.append(torch.optim.AdamW(others, betas=settings.betas, eps=settings.eps))
    if matrices:
        muon = torch.optim.Muon(matrices, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    return optimizers
