"""Engine `ddp`: the plain baseline, torch's DistributedDataParallel and AdamW.

Parameters, gradients and moments are fp32; bf16 and fp16 compute runs under autocast.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from toolkit.adapters.huggingface import inject
from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import StateShard, bias_shards, parameter_blocks
from toolkit.engines import optimizer as adam
from toolkit.engines.balance import Balance
from toolkit.engines.data_parallel import DataParallelEngine
from toolkit.engines.distributed import joint_norm
from toolkit.engines.owners import owner_shards
from toolkit.engines.setup import EngineSetup
from toolkit.models import huggingface as hf

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DdpEngine(DataParallelEngine):
    """A whole copy of a transformers model on every rank."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.model = hf.empty_model(setup.model_config, self.device)
        inject(self.model, setup.lora)
        hf.fill(self.model, setup.weights)
        hf.freeze(self.model, setup.frozen)
        hf.chunk_loss(self.model, setup.layout.loss)
        if setup.layout.recompute == "full":
            hf.enable_recompute(self.model)
        self.model.train()
        self.parameters = list(self.model.parameters())
        self.balance = Balance.of_transformers(setup, self.model)
        self.replica = self.model
        if self.world > 1:
            device_ids = [self.device] if self.device.type == "cuda" else None
            self.replica = DistributedDataParallel(
                self.model,
                device_ids=device_ids,
                broadcast_buffers=False,  # Rotary frequencies: the same on every rank.
            )
            self._settle_buckets()
        self.optimizer = self.new_optimizer(self.model, fused=True)
        self.bind_optimizer()

    def _settle_buckets(self) -> None:
        """Do one backward pass without effect.

        DDP reorders its gradient buckets after the first one, and with them the sums over
        ranks: the first step of a resumed run would differ from the uninterrupted run's in the
        last digits.
        """
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        torch.autograd.backward(hf.log_probs(self.replica, MicroBatch(tokens, tokens)).sum())
        self.model.zero_grad()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients are all-reduced once a step, in the last micro batch's backward."""
        if last or self.world == 1:
            return nullcontext()
        replica = cast(DistributedDataParallel, self.replica)
        return cast(AbstractContextManager[None], replica.no_sync())

    def gradients(self) -> Iterator[Tensor]:
        """See `DataParallelEngine.gradients`: all of them, on every rank."""
        return (p.grad for p in self.parameters if p.grad is not None)

    def gradient_norm(self) -> Tensor:
        """See `DataParallelEngine.gradient_norm`."""
        return joint_norm(self.gradients())

    def log_probs(self, batch: MicroBatch) -> Tensor:
        """See `hf.log_probs`; under autocast in 16 bits."""
        dtype = AUTOCAST.get(self.setup.precision)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return super().log_probs(batch)

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.replicated_weights`."""
        yield from self.model.named_parameters()

    def state(self) -> Iterator[StateShard]:
        """See `Engine.state`. Every rank holds all of it; they share out the writing."""
        for index, (name, parameter) in enumerate(hf.named_parameters(self.model)):
            yield StateShard(
                parameter_blocks(name, parameter.shape),
                adam.states(self.optimizer, parameter),
                saved_here=index % self.world == self.setup.ranks.rank,
            )
        yield from owner_shards([self.optimizer])
        yield from bias_shards(self.model, saved_here=self.setup.ranks.rank == 0)
