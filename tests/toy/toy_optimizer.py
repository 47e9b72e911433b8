"""A complete optimizer of another package: stochastic gradient descent with momentum.

M ← β₁ M + G, W ← W - lr·λ W - lr·M, with the first of `optimizer.betas`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.optimizers.base import OptimizerKind, Trained, WholeTensors

if TYPE_CHECKING:
    import torch

    from toolkit.engines.owners import UpdateRule
    from toolkit.recipe.schema import OptimizerSection


def rule(settings: "OptimizerSection") -> "UpdateRule":
    from toolkit.engines.owners import UpdateRule

    class Sgd(UpdateRule):
        def accumulate(
            self, gradient: "torch.Tensor", state: Mapping[str, "torch.Tensor"]
        ) -> None:
            gradient.add_(state["exp_avg"], alpha=self.settings.betas[0])
            state["exp_avg"].copy_(gradient)

    return Sgd(settings)


def reference(
    settings: "OptimizerSection", parameters: Sequence[Trained]
) -> list["torch.optim.Optimizer"]:
    import torch

    class Sgd(torch.optim.SGD):
        """torch's, whose own weight decay is a part of the gradient."""

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.mul_(1 - group["lr"] * group["decay"])
            super().step()

    groups = [
        {**one.group, "decay": one.group["weight_decay"], "weight_decay": 0.0}
        for one in parameters
    ]
    return [Sgd(groups, momentum=settings.betas[0])]


SGD = OptimizerKind(
    title="SGD",
    unused=("eps",),
    whole=WholeTensors("toy_optimizer:rule", moments=("exp_avg",)),
    reference="toy_optimizer:reference",
    packages=("toy", "toy-sgd"),
    no_adapter="nobody has tried",
)
