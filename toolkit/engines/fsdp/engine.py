"""Engines `fsdp` and `ddp`: torch's FSDP2 (`fully_shard`) around every decoder layer, AdamW.

Each rank holds rows of every trained parameter, in fp32, with their gradients and moments. A
layer's weights are gathered in the compute precision while they are used. The model is made
without storage, sharded, and then filled shard by shard. With `replicate`, all shards are there
that many times, each time in ranks that follow each other: weights are gathered among these,
and gradients are summed over the copies once a step. Engine `ddp` has a copy on every rank.

Frozen weights are held in the compute precision. In fp16 torch's GradScaler scales the loss.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
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

from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import StateShard, bias_shards, cut, parameter_blocks
from toolkit.engines import adamw as adam
from toolkit.engines import totals
from toolkit.engines.balance import Balance
from toolkit.engines.base import (
    NON_FINITE_GRADIENTS,
    Counters,
    StepResult,
    refusal,
)
from toolkit.engines.distributed import joint_norm, running_sum, to_device
from toolkit.engines.fsdp import config as fsdp_config
from toolkit.engines.owners import OwnerOptimizer, bind, local, owned_by, owned_of, owner_shards
from toolkit.engines.setup import EngineSetup
from toolkit.layout import DTYPES
from toolkit.models import huggingface as hf
from toolkit.models.adapters.huggingface import inject
from toolkit.models.frozen import freeze


class FsdpEngine(totals.LogProbEngine):
    """Rows of a transformers model on every rank."""

    optimizer: torch.optim.AdamW

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.device = setup.ranks.device
        self.world = setup.ranks.world
        self.objective, self.repeats = setup.objective, setup.layout.cp
        self.context = setup.context_group()
        self.scaler = loss_scaler(setup)
        config = setup.engine_config
        self.offloads = config["offload_policy"] is not None
        self.keeps_gathered = not config["reshard_after_forward"]
        self.reduces_once = not config["reduce_every_micro_batch"]
        self.copies: int = config["replicate"]
        self.sharded_over = self.world // self.copies
        """Ranks among which a parameter is sharded."""
        self.model = hf.meta_model(setup.model_config)
        inject(self.model, setup.lora)
        freeze(hf.tensors_of(self.model), setup.frozen)
        unmanaged = self._hold_frozen(getattr(torch, DTYPES[setup.precision]))
        setup.settle_kernels(self.model)
        self.balance = Balance.of_transformers(setup, self.model, self.context)
        self.units = self._shard(config, unmanaged)
        """Units that are gathered as one: the whole model's rest first, then in model order."""
        self.model.to_empty(device=torch.device("cpu") if self.offloads else self.device)
        hf.restore_buffers(self.model, setup.model_config, self.device)
        self.shards: dict[str, nn.Parameter] = dict(hf.named_parameters(self.model))
        """Kept, because gathering replaces the model's own parameters for a while."""
        self._fill()
        hf.enable_recompute(self.model, setup.layout.recompute)
        self.model.train()
        self._build_optimizer()

    def _hold_frozen(self, dtype: torch.dtype) -> set[nn.Parameter]:
        """Hold what does not train in `dtype`, in which it is computed.

        Returns what FSDP2 must not manage, as it would copy it: parameters that every rank has
        whole. They are on the device. All others are without storage.
        """
        whole = self.sharded_over == 1 and not self.offloads
        device = self.device if whole else torch.device("meta")
        held: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    continue
                if parameter not in held:
                    values = torch.empty_like(parameter, dtype=dtype, device=device)
                    held[parameter] = nn.Parameter(values, requires_grad=False)
                setattr(module, name, held[parameter])
        return {*held.values()} if whole else set()

    def _shard(self, config: dict[str, Any], unmanaged: set[nn.Parameter]) -> list[FSDPModule]:
        """Wrap layers, embedding, head and model as `fsdp.json` says."""
        dtypes = {key: getattr(torch, name) for key, name in config["mp_policy"].items()}
        arguments: dict[str, Any] = {
            "mesh": self._mesh(),
            "mp_policy": MixedPrecisionPolicy(**dtypes),
            "offload_policy": self._offload_policy(config["offload_policy"]),
            "ignored_params": unmanaged,
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
        _prefetch(units)
        return units

    def _mesh(self) -> DeviceMesh:
        """All ranks, or copies × shards. Where gradients lie in host memory, fp16's loss scaler
        sums there whether they are finite, which NCCL cannot."""
        if self.copies > 1:
            names = "replicate", "shard"
            shape = self.copies, self.sharded_over
            return init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        if self.device.type == "cpu" or not (self.offloads and self.scaler.is_enabled()):
            return init_device_mesh(self.device.type, (self.world,))
        both = dist.new_group(backend="cuda:nccl,cpu:gloo")
        return DeviceMesh.from_group(both, self.device.type)

    def _offload_policy(self, stated: dict[str, Any] | None) -> OffloadPolicy:
        """Pinned memory is what a GPU copies from. Without one there is none to be had."""
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
        """The first element of the flattened parameter that this rank holds, or would.

        FSDP2 cuts the first dimension as `torch.chunk` does: equal runs of rows, then a
        shorter one, then none.
        """
        rows = parameter.shape[0]
        run = -(-rows // self.sharded_over)
        first: int = min(self.setup.ranks.rank % self.sharded_over * run, rows)
        return first * (parameter.numel() // rows)

    def _build_optimizer(self) -> None:
        """Build the recipe's optimizer, the last part of an engine: one with owners is bound
        to the tensors of this rank.

        AdamW is fused: torch's default makes about ten passes over all states, and on GPUs
        allocates a temporary as large as the weights.
        """
        settings = self.setup.optimizer
        placed = ((p, parameter_blocks(n, p.shape)) for n, p in self.shards.items())
        owned = owned_of(placed, settings)
        groups = adam.parameter_groups(hf.tensors_of(self.model), settings, owned)
        if settings.kind.whole is not None:
            self.optimizer = optimizer = OwnerOptimizer(groups, settings)
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
        objective = self.objective
        sums = torch.zeros(1 + len(objective.metrics), dtype=torch.float64, device=self.device)
        self.balance.begin_step(micro_batches)
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self.prepare_backward(last=last)
            batch = to_device(micro_batch, self.device)
            with self.balance.observing(batch):
                log_probs = self.log_probs(batch)
            loss, parts = totals.terms(objective, log_probs, batch)
            self.balance.follow(loss, count)
            sums += parts / count / self.setup.layout.cp
            if last:
                joint_sums = running_sum(sums)
                self.balance.sum_up()
            # Gradients are averaged over ranks; the loss is a sum over them.
            torch.autograd.backward(self.scaler.scale(loss / count * self.world))
        self.scaler.unscale_(self.optimizer)
        values = torch.cat([joint_sums(), self.gradient_norm()[None]]).tolist()
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
        clip = self.setup.optimizer.clip_grad_norm
        if clip is not None and norm + 1e-6 > clip:
            # As torch.nn.utils.clip_grads_with_norm_ does, for shards too.
            torch._foreach_mul_(list(self.gradients()), clip / (norm + 1e-6))
        adam.set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()

    def prepare_backward(self, *, last: bool) -> None:
        """Reduce gradients in every micro batch's backward pass, over copies once a step.

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

    def gradients(self) -> Iterator[Tensor]:
        """This rank's rows."""
        return (local(p.grad) for p in self.shards.values() if p.grad is not None)

    def gradient_norm(self) -> Tensor:
        square = joint_norm(self.gradients()).square().to(self.device)
        dist.all_reduce(square)
        return square.div_(self.copies).sqrt()

    def log_probs(self, batch: MicroBatch) -> Tensor:
        return hf.log_probs(self.model, batch, self.context)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with hf.evaluating(self.model):
            yield
        for unit in self.units:  # no backward pass comes and drops what is still gathered
            unit.reshard()

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

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.sharded_over == 1:
            yield from ((name, local(parameter)) for name, parameter in self.shards.items())

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
        if self.context is not None:
            self.context.close()
        del self.model, self.units, self.shards, self.optimizer


class DdpEngine(FsdpEngine):
    """A copy of the model on every rank."""

    def __init__(self, setup: EngineSetup) -> None:
        layout = replace(setup.layout, zero_stage=2, replicate=setup.ranks.world)
        rendered = fsdp_config.render(layout, setup.precision)
        super().__init__(replace(setup, engine_config=rendered))


def loss_scaler(setup: EngineSetup) -> torch.amp.GradScaler:
    """torch's scaler of the loss. It does nothing unless in fp16."""
    return torch.amp.GradScaler(
        setup.ranks.device.type,
        init_scale=setup.plan.loss_scale or 2.0**16,
        enabled=setup.precision == "fp16",
    )


def _prefetch(units: Sequence[FSDPModule]) -> None:
    """Gather one unit ahead of the one that is computed, as the planner counts.

    FSDP2 itself begins to gather the next layer in the forward pass only when it gets there:
    a host that is slower than its GPU is then waited for.
    """
    model, *layers = units
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
    for earlier, unit in pairwise(layers):
        unit.set_modules_to_backward_prefetch([earlier])
    model.set_modules_to_backward_prefetch(layers[-1:])
