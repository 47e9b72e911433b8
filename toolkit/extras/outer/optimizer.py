"""How the holder applies changes of weights: the outer optimizers.

A round's outer gradient is Δ = θ - Σ_r n_r θ_r / Σ_r n_r, where replica r has trained n_r
tokens to get from θ to θ_r (DiLoCo, arXiv:2311.08105, algorithm 1). The update is torch's SGD:

    M ← μ M + Δ;   θ ← θ - lr (Δ + μ M) with Nesterov's momentum, θ - lr M without.

Asynchronous updates (Liu et al., "Asynchronous Local-SGD training for language modeling",
arXiv:2401.09135, algorithm 3 with c = 0) apply 1/R of each replica's gradient when it arrives,
and the momentum once per R arrivals: together the update above.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from toolkit.extras.outer import OuterSection

Floats: TypeAlias = npt.NDArray[np.float32]
Weights: TypeAlias = dict[str, Floats]
"""Tensors of the checkpoint by name, [rows, columns] or [rows]."""
Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Theirs."""


@dataclass
class OuterOptimizer:
    """Changes `weights` in place."""

    settings: OuterSection
    weights: Weights = field(default_factory=dict)
    momentum: Weights = field(default_factory=dict)
    """M; empty for the mean."""
    arrived: Weights = field(default_factory=dict)
    """Of asynchronous updates: the sum of the gradients since the momentum was applied."""
    arrivals: int = 0
    """Number of them."""

    def step(self, gradient: Weights) -> None:
        """Apply the outer gradient of a round, which is changed."""
        rate, mu = map(np.float32, self.settings.factors)
        for name, delta in gradient.items():
            if mu:
                momentum = self.momentum.setdefault(name, np.zeros_like(delta))
                momentum *= mu
                momentum += delta
                if self.settings.optimizer == "nesterov":
                    delta += mu * momentum
                else:
                    delta[...] = momentum
            self.weights[name] -= rate * delta

    def arrive(self, gradient: Weights, replicas: int) -> None:
        """Apply the gradient of one of so many replicas, which is changed."""
        rate, mu = map(np.float32, self.settings.factors)
        self.arrivals += 1
        whole_round = self.arrivals >= replicas
        nesterov = self.settings.optimizer == "nesterov"
        for name, delta in gradient.items():
            delta /= np.float32(replicas)
            self.weights[name] -= rate * delta
            if not mu:
                continue
            total = self.arrived.setdefault(name, np.zeros_like(delta))
            total += delta
            if whole_round:
                momentum = self.momentum.setdefault(name, np.zeros_like(delta))
                before = mu * momentum
                momentum[...] = before + total
                self.weights[name] -= rate * (mu * momentum if nesterov else before)
                total[...] = 0
        if whole_round:
            self.arrivals = 0


def mean_gradient(changes: list[tuple[float, Weights]]) -> Weights:
    """Δ of a round: minus the mean of the replicas' changes, weighted by their tokens."""
    total = sum(tokens for tokens, _ in changes)
    found: Weights = {}
    for tokens, change in changes:
        share = np.float32(-tokens / total) if total else np.float32(0)
        for name, values in change.items():
            part = share * values
            found[name] = found[name] + part if name in found else part
    return found


def shapes_of(weights: Weights) -> Shapes:
    """Their shapes."""
    return {name: values.shape for name, values in weights.items()}
