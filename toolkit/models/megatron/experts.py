"""A rank's experts as grouped products: torch's `grouped_mm` for all of them at once.

megatron-core's own grouped experts need Transformer Engine or the grouped_gemm package, and
without them it computes expert after expert.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import grouped_mm


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """SequentialMLP's parameters and function, in two products instead of two per expert.

    The experts' weights stay parameters of their own. Each pass stacks those of one layer,
    which is a copy, and frees it: only the parameters are kept for the backward pass.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.low_rank: dict[str, list[Any]] = {}
        """By linear layer, of each expert a module with `down`, `up` and `scaling`, whose
        product is added. Empty without adapters."""

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """[tokens, hidden], sorted by expert, int64 [local experts] on the host and [tokens] →
        [tokens, hidden], and no bias."""
        if not len(tokens):  # kernels may not take empty tensors
            in_turn: tuple[Tensor, None] = super().forward(tokens, tokens_per_expert, probs)
            return in_turn
        ends = torch.as_tensor(tokens_per_expert).cumsum(0, dtype=torch.int32)
        ends = ends.to(tokens.device, non_blocking=True)

        def product(name: str) -> _Product:
            layers = [getattr(expert, name) for expert in self.local_experts]
            return _Product(layers, self.low_rank.get(name, []), ends)

        grouped = SimpleNamespace(
            config=self.config,
            activation_func=self.local_experts[0].activation_func,
            linear_fc1=product("linear_fc1"),
            linear_fc2=product("linear_fc2"),
        )
        output: Tensor = MLP.forward(grouped, tokens, probs)[0]
        return output, None


class _Product(nn.Module):
    """One linear layer of all experts, as a module: what megatron-core's MLP calls."""

    def __init__(self, layers: Sequence[Any], added: Sequence[Any], ends: Tensor) -> None:
        super().__init__()
        for layer in (*layers, *added):
            # The distributed optimizer's wait for weights that are still being gathered.
            for hook in layer._forward_pre_hooks.values():
                hook(layer, ())
        self.ends, self.weights = ends, [layer.weight for layer in layers]
        self.factors = [one.down for one in added], [one.up for one in added]
        self.scaling = added[0].scaling if added else 1.0

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """[rows, inputs], sorted by expert → [rows, outputs], and no bias."""
        output: Tensor = _grouped_linear(rows, self.ends, *self.weights)
        down, up = self.factors
        if down:
            hidden = _grouped_linear(rows, self.ends, *down)
            output = output + self.scaling * _grouped_linear(hidden, self.ends, *up)
        return output, None


class _GroupedLinear(torch.autograd.Function):
    """The linear layer of each group of rows: [rows, inputs] → [rows, outputs].

    `ends`: int32 [groups], the row after the last of each. `weights`: [outputs, inputs] each.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return grouped_mm(rows, torch.stack(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = grouped_mm(gradient, torch.stack(weights), offs=ends)
        if not any(ctx.needs_input_grad[2:]):
            return of_rows, None, *[None] * len(weights)
        return of_rows, None, *grouped_mm(gradient.mT, rows, offs=ends).unbind()


_grouped_linear: Any = _GroupedLinear.apply
