"""What the engines have in common whose optimizer is torch's own: `ddp` and `fsdp`.

Both average gradients over ranks, and keep fp32 weights, gradients and moments; in fp16 both
scale the loss with torch's GradScaler.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.batch import MicroBatch
from toolkit.engines import adam
from toolkit.engines.base import NON_FINITE_GRADIENTS, Counters, EvalResult, StepResult, refusal
from toolkit.engines.distributed import RunningSum, global_tokens, to_device
from toolkit.engines.setup import EngineSetup
from toolkit.models import huggingface as hf


class DataParallelEngine:
    """Steps of a transformers model; how it is spread over ranks is the subclass's."""

    replica: nn.Module
    """What a forward pass goes through: the model, or a wrapper around it."""
    optimizer: torch.optim.AdamW

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.device = setup.ranks.device
        self.world = setup.ranks.world
        self.clip = setup.optimizer.clip_grad_norm
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.precision == "fp16")

    def new_optimizer(self, model: nn.Module, **implementation: bool) -> torch.optim.AdamW:
        """AdamW as the recipe has it; `implementation` is torch's `foreach` or `fused`."""
        wanted = self.setup.optimizer
        return torch.optim.AdamW(
            hf.parameter_groups(model, wanted.weight_decay),
            lr=wanted.learning_rate,
            betas=wanted.betas,
            eps=wanted.eps,
            **implementation,
        )

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        tokens: int,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        """See `Engine.train_step`."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with self.accumulating(last=last):
                batch_loss = self.summed_loss(batch).double() / tokens
                loss += batch_loss.detach()
                if last:
                    joint_loss = RunningSum(loss)
                # Gradients are averaged over ranks; the loss is a sum over them.
                torch.autograd.backward(self.scaler.scale(batch_loss * self.world))
        self.scaler.unscale_(self.optimizer)
        values = torch.stack([joint_loss.result(), self.gradient_norm()]).tolist()
        skipped = refusal(tokens, values[0], max_loss, values[1])
        if skipped is None:
            self._update(learning_rate, values[1])
        # fp16's scale is lowered for gradients that overflow, not for a refused loss.
        keep_scale = skipped not in (None, NON_FINITE_GRADIENTS)
        self.scaler.update(self.scaler.get_scale() if keep_scale else None)
        self.optimizer.zero_grad()
        return StepResult(values[0], values[1], tokens, skipped)

    def _update(self, learning_rate: float, norm: float) -> None:
        """Clip gradients of this norm, and step."""
        if self.clip is not None and norm + 1e-6 > self.clip:
            # As torch.nn.utils.clip_grads_with_norm_ does, for shards too.
            torch._foreach_mul_(list(self.gradients()), self.clip / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """In which forward and backward pass of one micro batch run."""
        raise NotImplementedError

    def gradients(self) -> Iterable[Tensor]:
        """What this rank holds of the step's gradients."""
        raise NotImplementedError

    def gradient_norm(self) -> Tensor:
        """L2 norm of all gradients: float64 scalar, equal on every rank."""
        raise NotImplementedError

    def summed_loss(self, batch: MicroBatch) -> Tensor:
        """See `hf.summed_loss`."""
        return hf.summed_loss(self.replica, to_device(batch, self.device))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """See `Engine.evaluate`."""
        tokens = global_tokens(micro_batches, self.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with hf.evaluating(self.replica):
            for batch in micro_batches:
                loss += self.summed_loss(batch)
        dist.all_reduce(loss)
        return EvalResult((loss / tokens).item(), int(tokens.item()))

    def counters(self) -> Counters:
        """See `Engine.counters`."""
        scale = None
        if self.scaler.is_enabled():
            scale = {"scale": self.scaler.get_scale(), "detail": self.scaler.state_dict()}
        return Counters(adam.steps_of([self.optimizer]), scale)

    def set_counters(self, counters: Counters) -> None:
        """See `Engine.set_counters`."""
        adam.set_steps([self.optimizer], counters.optimizer_steps)
        if counters.loss_scale is not None and self.scaler.is_enabled():
            own = self.scaler.state_dict()
            saved = counters.loss_scale["detail"]
            kept = saved if saved.keys() == own.keys() else own
            self.scaler.load_state_dict({**kept, "scale": counters.loss_scale["scale"]})

    def close(self) -> None:
        """See `Engine.close`."""
        del self.replica, self.optimizer
