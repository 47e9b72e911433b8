"""Engine `deepspeed`: ZeRO 0-3 and offload, for a model of either implementation."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import StateShard
from toolkit.engines import adamw as adam
from toolkit.engines import totals
from toolkit.engines.base import (
    NON_FINITE_GRADIENTS,
    Counters,
    StepResult,
    refusal,
)
from toolkit.engines.deepspeed import ops
from toolkit.engines.deepspeed.models import MegatronShard, TransformersModel, import_deepspeed
from toolkit.engines.deepspeed.state import (
    follow_masters,
    loss_scale,
    partitions,
    set_loss_scale,
    stage_3_owned,
    stage_3_shards,
    whole_parameters,
    zeroed,
)
from toolkit.engines.deepspeed.veto import Veto, let_skip
from toolkit.engines.distributed import running_sum, to_device
from toolkit.engines.owners import (
    OwnerOptimizer,
    bind,
    owned_by,
    owned_of,
    owner_shards,
)
from toolkit.engines.setup import EngineSetup
from toolkit.models import huggingface as hf
from toolkit.objectives.base import Pretrain


class DeepSpeedEngine(totals.LogProbEngine):
    """A model whose states DeepSpeed shards over the data-parallel ranks."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.objective, self.repeats = setup.objective, setup.layout.cp
        self.device = setup.ranks.device
        self.copies = setup.layout.dp * setup.layout.cp
        self.copy = setup.ranks.rank // setup.layout.tp
        self.stage = setup.layout.zero_stage
        if ops.compiled_at_start(ops.required_ops(setup.engine_config)):
            ops.use_own_folder()
        deepspeed = import_deepspeed()
        if self.device.type == "cuda":
            # The GPU that DeepSpeed uses. A scheduler may expose one GPU per rank, as device 0;
            # Open MPI's variable must be equal.
            os.environ["LOCAL_RANK"] = str(self.device.index)
            os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)
        deepspeed.init_distributed(
            dist_backend="nccl" if self.device.type == "cuda" else "gloo",
            auto_mpi_discovery=False,
            verbose=False,
        )
        self.context = setup.context_group()
        self.model = (
            MegatronShard(setup)
            if setup.plan.model == "megatron"
            else TransformersModel(setup, self.context)
        )
        self.data_group = self.model.data_group
        module = self.model.module
        self.veto = Veto(module)
        placed = [(parameter, blocks) for parameter, blocks, _ in self.model.placed()]
        groups = adam.parameter_groups(
            ((parameter, {block.tensor for block in blocks}) for parameter, blocks in placed),
            setup.optimizer,
            owned_of(placed, setup.optimizer),
        )
        for index, group in enumerate(groups):  # by which DeepSpeed sets experts apart
            group["name"] = f"group {index}"
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=self._new_optimizer(groups),
            model_parameters=groups,
            config=setup.engine_config,
            mpu=self.model.mpu,
        )
        if self.stage == 0:  # the optimizer is torch's own; from stage 1 on, it is wrapped
            let_skip(self.optimizer)
        self._uneven = False
        """Whether steps differ in their number of micro batches, to which DeepSpeed counts."""
        self._bind_optimizer()
        self.model.restore_buffers(self.engine.module)
        setup.fill_masters(self._shards())
        self.engine.train()

    def _new_optimizer(self, groups: list[dict[str, Any]]) -> OwnerOptimizer | None:
        """The optimizer that DeepSpeed wraps. None for the one in its configuration."""
        if self.setup.optimizer.kind.whole is None:
            return None
        from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

        if OwnerOptimizer not in ZERO_SUPPORTED_OPTIMIZERS:  # others give a warning
            ZERO_SUPPORTED_OPTIMIZERS.append(OwnerOptimizer)
        return OwnerOptimizer(groups, self.setup.optimizer)

    def _bind_optimizer(self) -> None:
        """Bind an optimizer with owners to the tensors of this rank. From stage 1 on a group is
        one flat tensor, or several, which DeepSpeed updates one after the other."""
        optimizer = self._adam
        if isinstance(optimizer, OwnerOptimizer):
            owned = owned_by(optimizer)
            if self.stage == 3:
                owned = dict.fromkeys(stage_3_owned(self.optimizer), optimizer)
            bind(owned, self._shards, self.setup, apart=self.stage > 0)

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        count: float,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        adam.set_learning_rate(self.optimizer, learning_rate)
        sums = torch.zeros(
            1 + len(self.objective.metrics), dtype=torch.float64, device=self.device
        )
        norm: float | None = None
        self.model.seed_dropout()
        balance = self.model.balance
        balance.begin_step(micro_batches)
        self._uneven |= len(micro_batches) != self.setup.layout.gradient_accumulation
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            if self._uneven:
                self.engine.set_gradient_accumulation_boundary(last)
            batch = to_device(micro_batch, self.device)
            with balance.observing(batch):
                log_probs = self.log_probs(batch)
            loss, parts = totals.terms(self.objective, log_probs, batch)
            balance.follow(loss, count)
            sums += parts / count / self.setup.layout.cp
            if last:
                joint_sums = running_sum(sums, self.data_group)
                balance.sum_up()
                self.veto.judge(joint_sums, max_loss, self.optimizer)
            # DeepSpeed averages gradients over its data-parallel ranks; the loss is a sum.
            self.engine.backward(loss / count * self.copies, scale_wrt_gas=False)
            if last and self.stage == 0:
                norm = self._plain_norm()
            self.engine.step()
        applied = self.engine.was_step_applied()
        mean_loss, *metrics, norm = self._read(joint_sums(), norm)
        skipped = refusal(count, mean_loss, max_loss)
        self.veto.end_step(skipped is not None, applied, self.optimizer)
        if skipped is None and not applied:
            skipped = NON_FINITE_GRADIENTS
        named = totals.named(self.objective, metrics)
        # A step that changes nothing has a rate of 0.
        named |= balance.end_step(applied=skipped is None and learning_rate > 0)
        return StepResult(mean_loss, norm, skipped, named)

    def _read(self, sums: Tensor, norm: float | None) -> list[float]:
        """Loss, metrics and gradient norm. With one synchronisation if the norm is also on the
        GPU."""
        reported = self.engine.get_global_grad_norm() if norm is None else norm
        if isinstance(reported, Tensor):
            return torch.cat([sums, reported.to(sums).reshape(1)]).tolist()
        return [*sums.tolist(), float(reported or 0.0)]

    def _plain_norm(self) -> float:
        """Gradient norm of stage 0, which DeepSpeed neither computes nor checks."""
        norm = float(self.model.gradient_norm(self.engine.module))
        self.optimizer.overflow = not math.isfinite(norm)
        return norm

    def log_probs(self, batch: MicroBatch) -> Tensor:
        return self.model.log_probs(self.engine, batch, self.context)

    def evaluating(self) -> AbstractContextManager[None]:
        return hf.evaluating(self.engine)

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.stage < 3:
            yield from self.engine.module.named_parameters()

    def state(self) -> Iterator[StateShard]:
        shards = self._shards()
        if self.stage == 3 and self.optimizer.swap_optimizer and not self._adam.state:
            self._allocate_swapped_moments()
            shards = zeroed(shards)
        return chain(shards, owner_shards([self._adam]), self.model.biases())

    def _shards(self) -> Iterator[StateShard]:
        """The parameters' part of the `state`. Moments on NVMe may not exist yet."""
        placed = self.model.placed()
        if self.stage == 0:
            return whole_parameters(self._adam, placed, self.copies, self.copy)
        if self.stage < 3:
            return partitions(self.optimizer, placed, self.copies, self.copy)
        return stage_3_shards(self.optimizer, placed, self.copy)

    def _allocate_swapped_moments(self) -> None:
        """Run a step that changes no weight: moments on NVMe exist only after the first
        step."""
        layout = self.setup.layout
        tokens = torch.zeros(layout.micro_batch, 2 * layout.cp, dtype=torch.int64)
        batch = MicroBatch(tokens, tokens)
        # The recipe's objective may need fields that this batch lacks.
        self.objective = Pretrain()
        self.train_step([batch] * layout.gradient_accumulation, 1, 0.0)
        self.objective = self.setup.objective
        adam.set_steps([self._adam], 0)

    def follow_state(self) -> None:
        if self.stage > 0:
            follow_masters(self.optimizer, self.stage)

    @property
    def _adam(self) -> Any:
        """The AdamW inside DeepSpeed's wrapper. Stage 0 has no wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def counters(self) -> Counters:
        scale = loss_scale(self.optimizer) if self.setup.precision == "fp16" else None
        return Counters(adam.steps_of([self._adam]), scale)

    def set_counters(self, counters: Counters) -> None:
        adam.set_steps([self._adam], counters.optimizer_steps)
        if counters.loss_scale is not None and self.setup.precision == "fp16":
            set_loss_scale(self.optimizer, counters.loss_scale)

    def close(self) -> None:
        self.engine.destroy()
        self.model.close()
        if self.context is not None:
            self.context.close()
        del self.engine, self.optimizer, self.model
