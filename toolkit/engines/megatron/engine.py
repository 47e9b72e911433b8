"""Engine `megatron`: megatron-core's schedules, gradient reduction and optimizer.

Tensor, pipeline, virtual pipeline, sequence and expert parallel are megatron-core's. The
loss of every micro batch is a sum. The gradients are divided by the count of the global batch
once they are reduced.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from toolkit.batch import MicroBatch, row_log_probs
from toolkit.checkpoint.shards import StateShard
from toolkit.engines import adamw as adam
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
from toolkit.engines.distributed import to_device
from toolkit.engines.megatron import state as megatron_state
from toolkit.engines.owners import OwnerOptimizer, bind, owned_by, owned_of, owner_shards
from toolkit.engines.setup import EngineSetup
from toolkit.models.adapters.megatron import attach
from toolkit.models.megatron import cpu, weights
from toolkit.models.megatron.model import (
    build_chunks,
    join_groups,
    leave_groups,
    log_probs,
    seed_dropout,
)

_Terms = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Loss function of a micro batch, given the last chunk's output: returns the summed loss, an
unused count, and the logged values."""


class MegatronEngine(Engine):
    """A GPTModel sharded over tensor, pipeline, expert and data-parallel ranks."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.device = setup.ranks.device
        self._ungathered = True
        """The optimizer has changed weights that other ranks have not received yet."""
        join_groups(setup.layout, setup.recipe.training.seed)
        assert (
            setup.layout.data_rank(setup.ranks.rank) == parallel_state.get_data_parallel_rank()
        ), "DMT and megatron-core number the ranks alike"
        assert setup.megatron is not None
        self.model = setup.megatron
        config = setup.engine_config
        self.chunks = build_chunks(
            self.model, config["transformer"], config["gpt"], setup.layout
        )
        self.balance = Balance.of_megatron(setup, self.chunks)
        attach(self.chunks, setup.lora)
        weights.fill(self.chunks, self.model, setup.weights)
        weights.freeze(self.chunks, self.model, setup.frozen)
        self.replicas = self._wrap()
        weights.fill_buffers(self.chunks, self.model, setup.weights)
        self.optimizer = self._build_optimizer()
        setup.fill_masters(self.state())
        self._configure_schedule()

    def _wrap(self) -> list[DistributedDataParallel]:
        """The chunks inside megatron-core's gradient buffers, ready to train."""
        config = DistributedDataParallelConfig(**self.setup.engine_config["ddp"])
        half = self.setup.precision != "fp32"
        replicas = []
        for index, chunk in enumerate(self.chunks):
            module = Float16Module(chunk.config, chunk) if half else chunk
            replica = DistributedDataParallel(
                chunk.config, config, module, disable_bucketing=index > 0
            )
            replica.train()
            replicas.append(replica)
        return replicas

    def _build_optimizer(self) -> Any:
        """megatron-core's AdamW, or our optimizer instead, with the groups of
        `adam.parameter_groups`."""
        arguments = self.setup.engine_config["optimizer"]
        dtype = getattr(torch, arguments["params_dtype"])
        config = OptimizerConfig(**{**arguments, "params_dtype": dtype})
        with cpu.cuda_type_names():
            optimizer = get_megatron_optimizer(
                config,
                self.replicas,
                self._group_overrides(),
                use_gloo_process_groups=False,
            )
        for group in optimizer.param_groups:
            # Otherwise done by megatron-core's own learning-rate scheduler.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            if "fused" in group:  # torch's AdamW, without Transformer Engine and Apex
                group["fused"] = True
        if self.setup.optimizer.kind.whole is not None:
            self._use_own(optimizer)
        return optimizer

    def _group_overrides(self) -> dict[ParamKey, dict[str, float]]:
        """What sets an optimizer's groups apart, in megatron-core's format: multipliers that
        are not 1, and whether an `UpdateRule` has the parameters."""
        overrides, settings = {}, self.setup.optimizer
        shards = [*weights.shards(self.chunks, self.model)]
        owned = owned_of(((shard.parameter, shard.blocks) for shard in shards), settings)
        tensors = weights.tensors_of(self.chunks, self.model)
        for group in adam.parameter_groups(tensors, settings, owned):
            named = {name: group[name] for name in ("lr_mult", "wd_mult") if group[name] != 1}
            named |= {"owned": True} if group["owned"] else {}
            members = {id(parameter) for parameter in group["params"]}
            chosen = ParamPredicate(str(named), lambda one, ids=members: id(one) in ids)
            overrides[ParamKey(predicate=chosen)] = named
        return overrides

    def _use_own(self, optimizer: Any) -> None:
        """Replace every optimizer of the chain by ours, with the same groups.

        The chain differs on ranks with experts, and is empty where nothing trains. All ranks
        take part in one exchange, before any optimizer steps.
        """
        owned: dict[Tensor, OwnerOptimizer] = {}
        for part in optimizer.chained_optimizers:
            if part.optimizer is not None:
                part.optimizer = self._with_own(part.optimizer.param_groups)
                owned |= owned_by(part.optimizer)
        self.optimizer = optimizer
        (unit,) = bind(owned, self.state, self.setup)
        unit.run_by_engine = True
        step = optimizer.step_with_ready_grads

        def exchange_and_step() -> bool:
            unit.compute()
            return bool(step())

        optimizer.step_with_ready_grads = exchange_and_step

    def _configure_schedule(self) -> None:
        """Configure how the schedules reduce gradients and scale the loss."""
        config = self.chunks[0].config
        config.finalize_model_grads_func = self._finalize_gradients
        config.grad_scale_func = self.optimizer.scale_loss
        if self.setup.engine_config["ddp"]["overlap_grad_reduce"]:
            config.grad_sync_func = [replica.start_grad_sync for replica in self.replicas]
            if len(self.replicas) == 1:
                (config.grad_sync_func,) = config.grad_sync_func
        if len(self.replicas) == 1:
            config.no_sync_func = self.replicas[0].no_sync
        else:
            config.no_sync_func = [replica.no_sync for replica in self.replicas]

    def _with_own(self, groups: list[dict[str, Any]]) -> OwnerOptimizer:
        """Our optimizer with the groups of megatron-core's."""
        empty = [{"owned": False, **group, "params": []} for group in groups]
        optimizer = OwnerOptimizer(empty, self.setup.optimizer)
        # fp32 shards are views of the model's weights, not leaves: torch would refuse them.
        for new, old in zip(optimizer.param_groups, groups, strict=True):
            new["params"] = old["params"]
        return optimizer

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        count: float,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        adam.set_learning_rate(self.optimizer, learning_rate)
        seed_dropout()
        for replica in self.replicas:
            replica.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._count = count
        self.balance.begin_step(micro_batches)
        if self.setup.recipe.model.balance is not None:
            # Gradients are divided by the count when they are reduced.
            scale = self.balance.scale.new_tensor(count)
            self.balance.scale_by(self.optimizer.scale_loss(scale))
        found, gradient_sum = self._run(micro_batches, forward_only=False)
        skipped = refusal(count, found.loss, max_loss, gradient_sum)
        grad_norm = math.inf
        if skipped is None:  # otherwise, gradients are cleared when the next step begins
            with cpu.cuda_type_names():
                updated, norm, _ = self.optimizer.step()
            self._ungathered = True
            if updated:
                grad_norm = float(norm)
            else:
                skipped = NON_FINITE_GRADIENTS
        named = {**found.metrics, **self.balance.end_step(applied=skipped is None)}
        return StepResult(found.loss, grad_norm, skipped, named)

    def _finalize_gradients(
        self, chunks: list[DistributedDataParallel], _: object, **groups: Any
    ) -> None:
        """Reduce the gradients, and divide them by the global count.

        megatron-core would sum its own count over the ranks, as an integer.
        """
        finalize_model_grads(chunks, None, **groups)
        if self._count:
            for chunk in chunks:
                chunk.scale_gradients(1.0 / self._count)

    def _gradient_sum(self) -> Tensor:
        """Sum of this rank's gradients, which is finite exactly where all of them are.

        In fp16 it is 0: overflow detection is left to the loss scaler.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.setup.precision != "fp16":
            for replica in self.replicas:
                for buffer in (*replica.buffers, *replica.expert_parallel_buffers):
                    total += buffer.grad_data.sum()
        return total

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        with self._evaluating():
            result, _ = self._run(micro_batches, forward_only=True)
        return result

    def sequence_log_probs(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The last pipeline stage has them."""
        with self._evaluating():
            found = self._schedule(micro_batches, self._sequences, forward_only=True)
        rows = sum(len(batch.input_ids) for batch in micro_batches)
        sums = torch.cat(found) if found else torch.zeros(rows, device=self.device)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(sums, last, group=parallel_state.get_pipeline_model_parallel_group())
        return sums.cpu()

    def _gather_weights(self) -> None:
        """Gather the weights that the next step's forward pass would gather. Collective if some
        are not gathered yet. Others are not touched, because that would overwrite a replica's
        error."""
        if self._ungathered and self.setup.engine_config["ddp"]["overlap_param_gather"]:
            for replica in self.replicas:
                replica.start_param_sync(force_sync=True)
        self._ungathered = False

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients. Training mode afterwards."""
        self._gather_weights()
        for replica in self.replicas:
            replica.eval()
        with torch.no_grad():
            yield
        for replica in self.replicas:
            replica.train()

    def _run(
        self, micro_batches: Sequence[MicroBatch], *, forward_only: bool
    ) -> tuple[EvalResult, float]:
        """Run the pipeline schedule. Returns, on all ranks, loss and metrics of the global
        batch, and a sum of all gradients (0 without a backward pass)."""
        sums = self._schedule(micro_batches, self._terms, forward_only=forward_only)
        # Only the last stage has losses, and all tensor and context ranks have the same ones.
        objective = self.setup.objective
        total = torch.zeros(4 + len(objective.metrics), dtype=torch.float64, device=self.device)
        if sums and parallel_state.get_tensor_and_context_parallel_rank() == 0:
            total[:-1] += torch.stack(sums).sum(dim=0)
        if not forward_only:
            total[-1] = self._gradient_sum()
            self.balance.sum_up()
        dist.all_reduce(total)
        *found, gradient_sum = total.tolist()
        return totals.eval_result(objective, found), gradient_sum

    def _schedule(
        self, micro_batches: Sequence[MicroBatch], terms: _Terms, *, forward_only: bool
    ) -> list[Tensor]:
        """Run the pipeline schedule. Returns, on the last stage, what `terms` logs for each
        batch."""
        micro_batch, length = micro_batches[0].input_ids.shape
        logged: list[Tensor] = get_forward_backward_func()(
            forward_step_func=partial(self._forward, terms),
            # One at a time: a validation's batches together may fill the GPU.
            data_iterator=[
                (to_device(batch, self.device) for batch in micro_batches)
                for _ in self.replicas
            ],
            model=self.replicas,
            num_microbatches=len(micro_batches),
            seq_length=length,
            micro_batch_size=micro_batch,
            forward_only=forward_only,
        )
        return logged

    def _forward(
        self, terms: _Terms, batches: Iterator[MicroBatch], chunk: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Run one micro batch through one chunk: its output, and the loss function of the last
        chunk."""
        batch = next(batches)
        with self.balance.observing(batch) if chunk.training else nullcontext():
            output = chunk(
                batch.input_ids,
                batch.positions,
                batch.segments,
                self.setup.ends_of(batch),
                labels=batch.labels,
                real=self.balance.real,
            )
        return output, partial(terms, batch)

    def _sequences(self, batch: MicroBatch, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `_terms`, but for `sequence_log_probs`, which needs no loss."""
        unused = torch.zeros((), dtype=torch.int, device=self.device)
        sums = row_log_probs(log_probs(losses, batch))
        return losses.sum(), unused, sums

    def _terms(self, batch: MicroBatch, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The summed loss of a micro batch, an unused count, and the logged values."""
        objective = self.setup.objective
        loss, parts = totals.terms(objective, log_probs(losses, batch), batch)
        unused = torch.zeros((), dtype=torch.int, device=self.device)
        return loss, unused, totals.counted(objective, parts, batch)

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._gather_weights()
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{index}.{name}", parameter

    def state(self) -> Iterator[StateShard]:
        yield from megatron_state.state(self.chunks, self.model, self.optimizer)
        yield from owner_shards(megatron_state.adams(self.optimizer))

    def follow_state(self) -> None:
        for part in self.optimizer.chained_optimizers:
            if part.optimizer is not None and hasattr(
                part, "_copy_main_params_to_model_params"
            ):
                part._copy_main_params_to_model_params()
        if self.setup.engine_config["ddp"]["use_distributed_optimizer"]:
            for replica in self.replicas:
                replica.start_param_sync(force_sync=True)
        self._ungathered = False

    def counters(self) -> Counters:
        steps = adam.steps_of(megatron_state.adams(self.optimizer))
        # If a pipeline stage is completely frozen, its ranks have no counts.
        most = torch.tensor(steps, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return Counters(int(most), megatron_state.loss_scale(self.optimizer))

    def set_counters(self, counters: Counters) -> None:
        adam.set_steps(megatron_state.adams(self.optimizer), counters.optimizer_steps)
        if counters.loss_scale is not None and self.setup.precision == "fp16":
            megatron_state.set_loss_scale(self.optimizer, counters.loss_scale, self.device)

    def close(self) -> None:
        for replica in self.replicas:
            # Hooks of its parameters hold it, in C++, where no garbage collection looks.
            vars(replica).clear()
        del self.replicas, self.optimizer, self.chunks
        leave_groups()
