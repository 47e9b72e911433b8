"""Engine `fsdp`: torch's FSDP2 (`fully_shard`) around every decoder layer, and AdamW.

Each rank holds rows of every parameter, in fp32, with their gradients and moments; a layer's
weights are gathered in the compute precision while they are used. The model is made without
storage, sharded, and then filled shard by shard. With `replicate`, all shards are there that
many times, each time in ranks that follow each other: weights are gathered among these, and
gradients are summed over the copies once a step.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from toolkit.adapters.huggingface import inject
from toolkit.checkpoint.shards import StateShard, bias_shards, cut, parameter_blocks
from toolkit.engines import optimizer as adam
from toolkit.engines.balance import Balance
from toolkit.engines.data_parallel import DataParallelEngine
from toolkit.engines.distributed import joint_norm
from toolkit.engines.owners import owner_shards
from toolkit.engines.setup import EngineSetup
from toolkit.models import huggingface as hf


class FsdpEngine(DataParallelEngine):
    """Rows of a transformers model on every rank."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        config = setup.engine_config
        offloads = config["offload_policy"] is not None
        self.keeps_gathered = not config["reshard_after_forward"]
        self.reduces_once = not config["reduce_every_micro_batch"]
        self.copies: int = config["replicate"]
        self.sharded_over = self.world // self.copies
        """Ranks among which a parameter is sharded."""
        self.model = hf.meta_model(setup.model_config)
        inject(self.model, setup.lora)
        hf.freeze(self.model, setup.frozen)
        setup.settle_kernels(self.model)
        self.balance = Balance.of_transformers(setup, self.model, self.context)
        self.units = self._shard(config)
        """What is gathered as one: the whole model's rest first, then in model order."""
        self.model.to_empty(device=torch.device("cpu") if offloads else self.device)
        hf.restore_buffers(self.model, setup.model_config, self.device)
        self.shards: dict[str, nn.Parameter] = dict(hf.named_parameters(self.model))
        """Kept: while weights are gathered, the model's own parameters are others."""
        self._fill()
        setup.enable_recompute(self.model)
        self.model.train()
        self.replica = self.model
        self.build_optimizer(self.model)

    def _shard(self, config: dict[str, Any]) -> list[FSDPModule]:
        """Wrap layers, embedding, head and model as `fsdp.json` says."""
        dtypes = {key: getattr(torch, name) for key, name in config["mp_policy"].items()}
        arguments: dict[str, Any] = {
            "mesh": self._mesh(config["offload_policy"] is not None),
            "mp_policy": MixedPrecisionPolicy(**dtypes),
            "offload_policy": self._offload_policy(config["offload_policy"]),
        }
        parts = hf.decoder_layers(self.model)
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        # A weight that both have belongs to one unit. A head in chunks runs many times, and its
        # gradient would be reduced as often; the rest's is at the end of the backward pass.
        if embedding.weight is not head.weight:
            parts = [embedding, *parts]
            parts += [head] if self.setup.layout.loss == "whole" else []
        for part in parts:
            # The backward pass begins with the head.
            reshard = config["reshard_after_forward"] and part is not head
            fully_shard(part, reshard_after_forward=reshard, **arguments)
        fully_shard(self.model, reshard_after_forward=False, **arguments)
        if embedding in parts and isinstance(embedding, nn.Embedding):
            # Its gradient does not depend on its weight.
            cast(FSDPModule, embedding).set_unshard_in_backward(False)
        units = [cast(FSDPModule, unit) for unit in (self.model, *parts)]
        _prefetch(units, config["forward_prefetch"], config["backward_prefetch"])
        return units

    def _mesh(self, offloads: bool) -> DeviceMesh:
        """All ranks, or copies × shards. Where gradients lie in host memory, fp16's loss scaler
        sums there whether they are finite, which NCCL cannot."""
        if self.copies > 1:
            names = "replicate", "shard"
            shape = self.copies, self.sharded_over
            return init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        if self.device.type == "cpu" or not (offloads and self.scaler.is_enabled()):
            return init_device_mesh(self.device.type, (self.world,))
        both = dist.new_group(backend="cuda:nccl,cpu:gloo")
        return DeviceMesh.from_group(both, self.device.type)

    def _offload_policy(self, stated: dict[str, Any] | None) -> OffloadPolicy:
        """Pinned memory is what a GPU copies from; without one there is none to be had."""
        if stated is None:
            return OffloadPolicy()
        return CPUOffloadPolicy(stated["pin_memory"] and self.device.type == "cuda")

    @torch.no_grad()
    def _fill(self) -> None:
        """Give every shard its initial values."""
        for name, parameter in self.shards.items():
            held, first = local(parameter), self._first_element(parameter)
            values = self.setup.weights.read(name, first, first + held.numel())
            held.copy_(values.view_as(held))
        hf.fill_biases(self.model, self.setup.weights)

    def _first_element(self, parameter: nn.Parameter) -> int:
        """Of the flattened parameter, the first element that this rank holds, or would.

        FSDP2 cuts the first dimension as `torch.chunk` does: equal runs of rows, then a
        shorter one, then none.
        """
        rows = parameter.shape[0]
        run = -(-rows // self.sharded_over)
        first: int = min(self.setup.ranks.rank % self.sharded_over * run, rows)
        return first * (parameter.numel() // rows)

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients are reduced in every micro batch's backward pass, over copies once a step.

        In stage 1 they are reduced once a step altogether: until then every rank holds the
        fp32 sum of all micro batches whole, 4 bytes per parameter. The last micro batch also
        waits for the reduction and, in stages 1 and 2, drops the gathered weights.
        """
        self.units[0].set_is_last_backward(last)
        if self.reduces_once:
            self.units[0].set_requires_gradient_sync(last)
        elif self.copies > 1:
            self.units[0].set_requires_all_reduce(last)
        if self.keeps_gathered:
            self.units[0].set_reshard_after_backward(last)
        return nullcontext()

    def gradients(self) -> Iterator[Tensor]:
        """This rank's rows."""
        return (local(p.grad) for p in self.shards.values() if p.grad is not None)

    def gradient_norm(self) -> Tensor:
        square = joint_norm(self.gradients()).square().to(self.device)
        dist.all_reduce(square)
        return square.div_(self.copies).sqrt()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with super().evaluating():
            yield
        for unit in self.units:  # no backward pass comes and drops what is still gathered
            unit.reshard()

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Nothing."""
        return iter(())

    def state(self) -> Iterator[StateShard]:
        copy = self.setup.ranks.rank // self.sharded_over
        for index, (name, parameter) in enumerate(self.shards.items()):
            states = adam.states(self.optimizer, parameter)
            values = {quantity: local(state) for quantity, state in states.items()}
            first = self._first_element(parameter)
            blocks = parameter_blocks(name, parameter.shape)
            held = cut(blocks, first, first + values["weight"].numel())
            yield StateShard(held, values, saved_here=index % self.copies == copy)
        yield from owner_shards([self.optimizer])
        yield from bias_shards(self.model, saved_here=self.setup.ranks.rank == 0)

    def close(self) -> None:
        super().close()
        del self.model, self.units, self.shards


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor: the memory itself, without history."""
    return cast(DTensor, tensor.detach()).to_local()


def _prefetch(units: Sequence[FSDPModule], forward: int, backward: int) -> None:
    """Gather so many units ahead of the one that is computed.

    FSDP2 itself begins to gather the next layer in the forward pass only when it gets there:
    a host that is slower than its GPU is then waited for.
    """
    model, *layers = units
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(layers[index : index + forward]))
    for index, unit in enumerate(layers):
        earlier = layers[max(0, index - backward) : index]
        unit.set_modules_to_backward_prefetch(earlier[::-1])
    model.set_modules_to_backward_prefetch(layers[: -backward - 1 : -1])
