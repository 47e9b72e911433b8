"""Engine `ddp`: the plain baseline, torch's DistributedDataParallel and AdamW.

Parameters, gradients and moments are fp32; bf16 and fp16 compute runs under autocast.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.checkpoint.shards import StateShard, parameter_blocks
from toolkit.engines import adam
from toolkit.engines.base import (
    NON_FINITE_GRADIENTS,
    Counters,
    EvalResult,
    MicroBatch,
    StepResult,
    refusal,
)
from toolkit.engines.distributed import global_tokens, gradient_norm, to_device
from toolkit.engines.setup import EngineSetup
from toolkit.models import huggingface as hf

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DdpEngine:
    """A whole copy of a transformers model on every rank."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.device = setup.ranks.device
        self.world = setup.ranks.world
        self.clip = setup.optimizer.clip_grad_norm
        self.model = hf.empty_model(setup.model_config, self.device)
        hf.fill(self.model, setup.weights)
        if setup.layout.recompute == "full":
            hf.enable_recompute(self.model)
        self.model.train()
        self.replica: nn.Module = self.model
        if self.world > 1:
            device_ids = [self.device] if self.device.type == "cuda" else None
            self.replica = DistributedDataParallel(self.model, device_ids=device_ids)
            self._settle_buckets()
        self.optimizer = torch.optim.AdamW(
            hf.parameter_groups(self.model, setup.optimizer.weight_decay),
            lr=setup.optimizer.learning_rate,
            betas=setup.optimizer.betas,
            eps=setup.optimizer.eps,
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.precision == "fp16")

    def _settle_buckets(self) -> None:
        """Do one backward pass for nothing.

        DDP orders its gradient buckets anew behind the first one, and with them the sums over
        ranks: the first step of a resumed run would differ from the unbroken one's in the last
        digits.
        """
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        torch.autograd.backward(hf.summed_loss(self.replica, MicroBatch(tokens, tokens)))
        self.model.zero_grad()

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        """See `Engine.train_step`."""
        tokens = global_tokens(micro_batches, self.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with self._reduce_gradients(last):
                batch_loss = self._loss(batch) / tokens
                # DDP averages gradients over ranks; the loss is a sum over them.
                torch.autograd.backward(self.scaler.scale(batch_loss * self.world))
            loss += batch_loss.detach()
        dist.all_reduce(loss)
        self.scaler.unscale_(self.optimizer)
        norm = gradient_norm(self.model.parameters())
        values = torch.stack([loss, norm, tokens]).tolist()
        skipped = refusal(values[0], max_loss, values[1])
        if skipped is None:
            self._update(learning_rate, norm)
        # That fp16's scale is too high is said by gradients, not by a refused loss.
        keep_scale = skipped not in (None, NON_FINITE_GRADIENTS)
        self.scaler.update(self.scaler.get_scale() if keep_scale else None)
        self.optimizer.zero_grad()
        return StepResult(values[0], values[1], int(values[2]), skipped)

    def _reduce_gradients(self, last: bool) -> "nullcontext[None]":
        """Gradients are all-reduced once a step, in the last micro batch's backward."""
        if last or self.world == 1:
            return nullcontext()
        replica = cast(DistributedDataParallel, self.replica)
        return cast("nullcontext[None]", replica.no_sync())

    def _update(self, learning_rate: float, norm: Tensor) -> None:
        """Clip gradients of this norm, and step."""
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.step(self.optimizer)

    def _loss(self, batch: MicroBatch) -> Tensor:
        dtype = AUTOCAST.get(self.setup.precision)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return hf.summed_loss(self.replica, to_device(batch, self.device))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """See `Engine.evaluate`."""
        tokens = global_tokens(micro_batches, self.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with hf.evaluating(self.replica):
            for batch in micro_batches:
                loss += self._loss(batch)
        dist.all_reduce(loss)
        return EvalResult((loss / tokens).item(), int(tokens.item()))

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.replicated_weights`."""
        yield from self.model.named_parameters()

    def state(self) -> Iterator[StateShard]:
        """See `Engine.state`. Every rank holds all of it; they share out the writing."""
        for index, (name, parameter) in enumerate(self.model.named_parameters()):
            yield StateShard(
                parameter_blocks(name, parameter.shape),
                adam.moments(self.optimizer, parameter),
                saved_here=index % self.world == self.setup.ranks.rank,
            )

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
