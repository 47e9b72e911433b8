"""Common parts of the engines that use torch's own optimizer: `ddp` and `fsdp`.

Both average gradients over ranks, and keep fp32 weights, gradients and moments; in fp16 both
scale the loss with torch's GradScaler.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import parameter_blocks
from toolkit.engines import optimizer as adam
from toolkit.engines import totals
from toolkit.engines.balance import Balance
from toolkit.engines.base import (
    NON_FINITE_GRADIENTS,
    Counters,
    Engine,
    EvalResult,
    StepResult,
    refusal,
)
from toolkit.engines.distributed import RunningSum, to_device
from toolkit.engines.owners import bind, new_optimizer, owned_by
from toolkit.engines.setup import EngineSetup
from toolkit.models import huggingface as hf


class DataParallelEngine(Engine):
    """Training steps of a transformers model; the subclass distributes it over ranks."""

    replica: nn.Module
    """The callable of a forward pass: the model, or a wrapper around it."""
    optimizer: torch.optim.AdamW
    balance: Balance

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.device = setup.ranks.device
        self.world = setup.ranks.world
        self.context = setup.context_group()
        self.clip = setup.optimizer.clip_grad_norm
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=setup.loss_scale or 2.0**16,
            enabled=setup.precision == "fp16",
        )

    def build_optimizer(self, model: nn.Module) -> None:
        """Build the recipe's optimizer, the last part of an engine: one with owners is bound
        to the tensors of this rank.

        AdamW is fused: torch's default makes about ten passes over all states, and on GPUs
        allocates a temporary as large as the weights.
        """
        settings = self.setup.optimizer
        groups = adam.parameter_groups(hf.tensors_of(model), settings)
        if settings.kind.whole is not None:
            placed = ((p, parameter_blocks(n, p.shape)) for n, p in hf.named_parameters(model))
            self.optimizer = optimizer = new_optimizer(groups, placed, settings)
            bind(owned_by(optimizer), self.state, self.setup)
            return
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        count: float,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        objective = self.setup.objective
        sums = torch.zeros(1 + len(objective.metrics), dtype=torch.float64, device=self.device)
        self.balance.begin_step(micro_batches)
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with self.accumulating(last=last):
                batch = to_device(micro_batch, self.device)
                with self.balance.observing(batch):
                    log_probs = self.log_probs(batch)
                loss, parts = totals.terms(objective, log_probs, batch)
                self.balance.follow(loss, count)
                sums += parts / count / self.setup.layout.cp
                if last:
                    joint_sums = RunningSum(sums)
                    self.balance.sum_up()
                # Gradients are averaged over ranks; the loss is a sum over them.
                torch.autograd.backward(self.scaler.scale(loss / count * self.world))
        self.scaler.unscale_(self.optimizer)
        values = torch.cat([joint_sums.result(), self.gradient_norm()[None]]).tolist()
        mean_loss, *metrics, norm = values
        skipped = refusal(count, mean_loss, max_loss, norm)
        if skipped is None:
            self._update(learning_rate, norm)
        # fp16's scale is lowered for gradients that overflow, not for a refused loss.
        keep_scale = skipped not in (None, NON_FINITE_GRADIENTS)
        self.scaler.update(self.scaler.get_scale() if keep_scale else None)
        self.optimizer.zero_grad()
        named = totals.named(objective, metrics)
        named |= self.balance.end_step(applied=skipped is None)
        return StepResult(mean_loss, norm, skipped, named)

    def _update(self, learning_rate: float, norm: float) -> None:
        """Clip gradients of this norm, and step."""
        if self.clip is not None and norm + 1e-6 > self.clip:
            # As torch.nn.utils.clip_grads_with_norm_ does, for shards too.
            torch._foreach_mul_(list(self.gradients()), self.clip / (norm + 1e-6))
        adam.set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of the forward and backward pass of one micro batch."""
        raise NotImplementedError

    def gradients(self) -> Iterable[Tensor]:
        """This rank's part of the step's gradients."""
        raise NotImplementedError

    def gradient_norm(self) -> Tensor:
        """L2 norm of all gradients: float64 scalar, equal on every rank."""
        raise NotImplementedError

    def log_probs(self, batch: MicroBatch) -> Tensor:
        """See `hf.log_probs`."""
        return hf.log_probs(self.replica, batch, self.context)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        with self.evaluating():
            return totals.evaluate(
                self.setup.objective,
                micro_batches,
                self.log_probs,
                self.device,
                repeats=self.setup.layout.cp,
            )

    def sequence_log_probs(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        with self.evaluating():
            return totals.sequence_log_probs(micro_batches, self.log_probs, self.device)

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of forward passes without a backward pass."""
        return hf.evaluating(self.replica)

    def follow_state(self) -> None:
        """Nothing: the weights of the state are the model's, or are gathered from there."""

    def counters(self) -> Counters:
        scale = None
        if self.scaler.is_enabled():
            scale = {"scale": self.scaler.get_scale(), "detail": self.scaler.state_dict()}
        return Counters(adam.steps_of([self.optimizer]), scale)

    def set_counters(self, counters: Counters) -> None:
        adam.set_steps([self.optimizer], counters.optimizer_steps)
        if counters.loss_scale is not None and self.scaler.is_enabled():
            own = self.scaler.state_dict()
            saved = counters.loss_scale["detail"]
            kept = saved if saved.keys() == own.keys() else own
            self.scaler.load_state_dict({**kept, "scale": counters.loss_scale["scale"]})

    def close(self) -> None:
        if self.context is not None:
            self.context.close()
        del self.replica, self.optimizer
