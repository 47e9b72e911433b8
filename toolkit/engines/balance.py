"""Expert load balancing (`model.balance`), defined independently of the layout.

Each layer adds to the loss, per sequence of T tokens and N experts, k of which are chosen per
token,

    coefficient · Σ_i f_i P_i   with f_i = N/(k T) · (tokens that chose i), P_i = 1/T · Σ_t s_it

(DeepSeek-V3, arXiv:2412.19437, equations 17 to 20; s are the scores of a token, which sum to 1)
and z_loss · 1/T · Σ_t (log Σ_i exp logit_it)² (ST-MoE, arXiv:2202.08906, equation 5). Both are
means over the sequences of the global batch, so neither ranks nor micro batches change them.
Only tokens up to the last trained label of a row count. What follows is padding.

The terms are not part of an engine's loss, which may be on another pipeline stage. Their
gradients are added at the router's weights, scaled like those of the loss itself.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.batch import MicroBatch
from toolkit.engines.distributed import running_sum
from toolkit.engines.setup import EngineSetup
from toolkit.models import routers
from toolkit.models.context import Context
from toolkit.models.families import model_spec
from toolkit.models.routers import Routing
from toolkit.models.types import SCORES


class Balance:
    """The routing of one rank's model in a step, and the gradients of the balancing terms.

    Without `model.balance` it observes nothing and adds nothing.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.settings = setup.recipe.model.balance
        self.data_ranks = setup.layout.dp
        self.device = setup.ranks.device
        self.group: dist.ProcessGroup | None = None
        """Ranks that hold other tokens of the same rows. None if this rank holds whole rows."""
        self.context: Context | None = None
        self.layers = 0
        self.experts = self.per_token = 0
        self.routers: dict[int, nn.Module] = {}
        """This rank's routers, by the layer's index among those with experts."""
        self.bias = "e_score_correction_bias"
        """Attribute of a router that holds its correction bias, which stays in fp32."""
        if self.settings is not None:
            config = setup.model_config.to_dict()
            self.score = SCORES[config["model_type"]]
            spec = model_spec(config)
            self.experts, self.per_token = spec.experts, spec.experts_per_token
        self.scale = torch.zeros((), device=self.device)
        """Scale of the value that the backward pass starts from, relative to the loss of the
        global batch."""
        self._rows = 0
        self.real: Tensor | None = None
        """`Routing.real` of the current micro batch. None: routers are not observed."""
        self._records = False

    @classmethod
    def of_transformers(
        cls, setup: EngineSetup, model: nn.Module, context: Context | None
    ) -> "Balance":
        """Balance of a transformers model, before an engine wraps it."""
        balance = cls(setup)
        balance.context = context
        balance.group = None if context is None else context.group
        if balance.settings is not None:
            balance.routers = routers.watch(model, lambda: balance.real, balance._observe)
            balance.layers = len(balance.routers)
        return balance

    @classmethod
    def of_megatron(cls, setup: EngineSetup, chunks: Sequence[nn.Module]) -> "Balance":
        """Balance of the chunks of a GPTModel."""
        from megatron.core import parallel_state

        from toolkit.models.megatron.routers import watch

        balance = cls(setup)
        if balance.settings is not None:
            assert setup.megatron is not None
            balance.layers = len(setup.megatron.moe_layers)
            if setup.layout.sequence_parallel:
                balance.group = parallel_state.get_tensor_and_context_parallel_group()
            elif setup.layout.cp > 1:
                balance.group = parallel_state.get_context_parallel_group()
            balance.routers = watch(chunks, setup.megatron, balance._observe)
            balance.bias = "expert_bias"
        return balance

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Reset the counts. Data-parallel ranks have equally many rows."""
        if self.settings is None:
            return
        mine = sum(len(batch.input_ids) for batch in micro_batches)
        self._rows = mine * self.data_ranks
        size = self.layers * self.experts
        self._sums = torch.zeros(size + 4, dtype=torch.float64, device=self.device)
        self._counts = self._sums[:size].view(self.layers, self.experts)
        """Tokens by layer and expert, followed by all tokens, entropies, and both terms."""

    @contextmanager
    def observing(self, batch: MicroBatch) -> Iterator[None]:
        """Context of the forward pass of a micro batch.

        A layer that is recomputed in the backward pass gets its gradient, but is not counted
        again.
        """
        if self.settings is not None:
            left = batch.trained.flip(1).int().cumsum(1).flip(1)
            self.real = left > 0
            if self.context is not None:
                self.real = self.context.own(self.real)
        self._records = True
        yield
        self._records = False

    def follow(self, loss: Tensor, count: float) -> None:
        """Scale the gradients as the backward pass scales that of a micro batch's `loss`."""
        if self.settings is not None:
            loss.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self.scale_by(gradient * count)
            )

    def scale_by(self, scale: Tensor) -> None:
        """Scale the following gradients by `scale`, relative to the logged terms."""
        self.scale.copy_(scale.squeeze())

    def _observe(self, layer: int, routing: Routing) -> Tensor:
        """See `routers.Observer`."""
        assert self.settings is not None
        logits, real = routing.logits.float(), routing.real
        chosen = (routing.chosen & real[..., None]).sum(1, dtype=torch.float32)
        tokens = real.sum(1, dtype=torch.float32)
        whole = torch.cat([chosen, tokens[:, None]], dim=1)
        if self.group is not None:
            dist.all_reduce(whole, group=self.group)
        counts, length = whole[:, :-1], whole[:, -1:].clamp(min=1)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True) * real[..., None]
        frequency = self.experts * counts / counts.sum(1, keepdim=True).clamp(min=1)
        share = scores.sum(1) / length
        even = self.settings.coefficient * (frequency * share).sum() / self._rows
        squares = logits.logsumexp(-1).square() * real / length
        small = self.settings.z_loss * squares.sum() / self._rows
        if self._records:
            self._record(layer, chosen, tokens, scores, even, small)
        weights: Tensor = _Joined.apply(routing.weights, even + small, self.scale)  # type: ignore[no-untyped-call]
        return weights

    @torch.no_grad()
    def _record(
        self, layer: int, chosen: Tensor, tokens: Tensor, scores: Tensor, *terms: Tensor
    ) -> None:
        """Count [rows, experts] choices, [rows] tokens and what is logged of their `scores`."""
        self._counts[layer] += chosen.sum(0)
        entropy = -torch.xlogy(scores, scores).sum()
        self._sums[-4:] += torch.stack([tokens.sum(), entropy, *terms])

    def sum_up(self) -> None:
        """Start the sum over all ranks, after the last forward pass. Collective."""
        if self.settings is not None:
            self._joint = running_sum(self._sums)

    def end_step(self, *, applied: bool) -> dict[str, float]:
        """The metrics of the global batch. If the step was `applied`, the correction biases are
        updated: b_i += bias_update · sign(mean count − count_i) (arXiv:2408.15664, algorithm
        1)."""
        self.real = None
        if self.settings is None:
            return {}
        self._joint()
        if applied and self.settings.kind == "bias":
            missing = self._counts.mean(1, keepdim=True) - self._counts
            for layer, router in self.routers.items():
                bias = getattr(router, self.bias)
                bias += self.settings.bias_update * missing[layer].sign().to(bias.dtype)
        tokens, entropy, even, small = self._sums[-4:].tolist()
        load = self._counts / self._counts.mean(1, keepdim=True)
        return {
            "balance_loss": even,
            "router_z_loss": small,
            "busiest_expert": float(load.max()),
            "router_entropy": entropy / tokens if tokens else math.nan,
            "dropped_tokens": tokens * self.per_token - float(self._counts.sum()),
        }


class _Joined(torch.autograd.Function):
    """Identity on a router's weights. The backward pass adds the gradient of a balancing
    term."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, term: Tensor, scale: Tensor) -> Tensor:
        """`scale` is read in the backward pass."""
        ctx.scale, ctx.dtype = scale, term.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """The weights' gradient passes through."""
        return gradient, ctx.scale.to(ctx.dtype), None
