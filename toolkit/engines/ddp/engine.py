"""Engine `ddp`: the plain baseline, a whole copy of the model on every rank, and AdamW.

Weights that are updated, gradients and moments are fp32. In fp32 the copies are torch's
DistributedDataParallel. In 16 bits, where it would sum gradients in 16 bits or, under autocast,
keep the residual stream in fp32, they are FSDP2's replicas with a single shard each.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any, cast

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
from toolkit.engines.fsdp import config as fsdp_config
from toolkit.engines.fsdp.engine import FsdpEngine, local
from toolkit.engines.owners import owner_shards
from toolkit.engines.setup import EngineSetup
from toolkit.models import compiled
from toolkit.models import huggingface as hf

_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "broadcast_buffers"  # its name before torch 2.13


def build(setup: EngineSetup) -> DataParallelEngine:
    """The engine in the recipe's precision."""
    return DdpEngine(setup) if setup.precision == "fp32" else HalfDdpEngine(setup)


class HalfDdpEngine(FsdpEngine):
    """Replicas that compute in 16 bits and are updated in fp32."""

    def __init__(self, setup: EngineSetup) -> None:
        layout = replace(setup.layout, zero_stage=2, replicate=setup.ranks.world)
        rendered = fsdp_config.render(layout, setup.precision)
        super().__init__(replace(setup, engine_config=rendered))

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The fp32 weights."""
        return ((name, local(parameter)) for name, parameter in self.shards.items())


class DdpEngine(DataParallelEngine):
    """Replicas in fp32."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.model = hf.empty_model(setup.model_config, self.device)
        inject(self.model, setup.lora)
        hf.fill(self.model, setup.weights)
        hf.freeze(self.model, setup.frozen)
        setup.settle_kernels(self.model)
        setup.enable_recompute(self.model)
        self.model.train()
        self.parameters = list(self.model.parameters())
        self.balance = Balance.of_transformers(setup, self.model, self.context)
        self.replica = self.model
        if self.world > 1:
            device_ids = [self.device] if self.device.type == "cuda" else None
            # Rotary frequencies: the same on every rank.
            sync: dict[str, Any] = {_SYNC_BUFFERS: False}
            self.replica = DistributedDataParallel(
                self.model,
                device_ids=device_ids,
                gradient_as_bucket_view=True,
                **sync,
            )
            self._settle_buckets()
        self.build_optimizer(self.model)

    def _settle_buckets(self) -> None:
        """Run one backward pass without effect.

        DDP reorders its gradient buckets, and thus the sums over ranks, after the first one:
        otherwise, the first step of a resumed run would differ from the uninterrupted run in
        the last digits.
        """
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        with compiled.eager():
            log_probs = hf.log_probs(self.replica, MicroBatch(tokens, tokens))
            torch.autograd.backward(log_probs.sum())
        self.model.zero_grad()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients are all-reduced once a step, in the last micro batch's backward."""
        if last or self.world == 1:
            return nullcontext()
        replica = cast(DistributedDataParallel, self.replica)
        return cast(AbstractContextManager[None], replica.no_sync())

    def gradients(self) -> Iterator[Tensor]:
        """All of them, on every rank."""
        return (p.grad for p in self.parameters if p.grad is not None)

    def gradient_norm(self) -> Tensor:
        return joint_norm(self.gradients())

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()

    def state(self) -> Iterator[StateShard]:
        """Every rank holds all of it; each writes a part."""
        for index, (name, parameter) in enumerate(hf.named_parameters(self.model)):
            yield StateShard(
                parameter_blocks(name, parameter.shape),
                adam.states(self.optimizer, parameter),
                saved_here=index % self.world == self.setup.ranks.rank,
            )
        yield from owner_shards([self.optimizer])
        yield from bias_shards(self.model, saved_here=self.setup.ranks.rank == 0)
