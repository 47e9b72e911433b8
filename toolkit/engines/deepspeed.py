"""Engine `deepspeed`: ZeRO 0-3 and offload, for a model of either implementation."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from toolkit.engines.base import (
    NON_FINITE_GRADIENTS,
    EvalResult,
    MicroBatch,
    StepResult,
    refusal,
)
from toolkit.engines.deepspeed_models import build_model, gathered, import_deepspeed
from toolkit.engines.deepspeed_veto import Veto, let_skip
from toolkit.engines.distributed import global_tokens, to_device
from toolkit.engines.setup import EngineSetup
from toolkit.errors import CheckpointError
from toolkit.models import huggingface as hf

TAG = "state"
"""DeepSpeed's name for the one checkpoint inside the folder that we give it."""

SWAPPED_STATES = (None, "exp_avg", "exp_avg_sq")
"""DeepSpeed's keys of a shard's states: fp32 weights, first and second moment."""


class DeepSpeedEngine:
    """A model whose states DeepSpeed shards over the data-parallel ranks."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.device = setup.ranks.device
        self.copies = setup.layout.dp
        self.stage = setup.layout.zero_stage
        deepspeed = import_deepspeed()
        deepspeed.init_distributed(
            dist_backend="nccl" if self.device.type == "cuda" else "gloo",
            auto_mpi_discovery=False,
            verbose=False,
        )
        self.model = build_model(setup)
        module = self.model.module
        self.veto = Veto(module)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module,
            model_parameters=hf.parameter_groups(module, setup.optimizer.weight_decay),
            config=setup.engine_config,
            mpu=self.model.mpu,
        )
        self.plain = self.stage == 0 and setup.precision == "fp32"
        """The optimizer is torch's own; every other one is wrapped by DeepSpeed."""
        if self.plain:
            let_skip(self.optimizer)
        elif self.stage == 0:
            _undo_first_step(self.optimizer)
        self.model.restore_buffers(self.engine.module)
        self.engine.train()

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        """See `Engine.train_step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        tokens = global_tokens(micro_batches, self.device, self.model.data_group)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        norm: float | None = None
        self.model.seed_dropout()
        loss_scale = self._loss_scale_of_norm()
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            batch_loss = self._loss(batch) / tokens
            loss += batch_loss.detach()
            if last:
                dist.all_reduce(loss, group=self.model.data_group)
                self.veto.judge(loss, max_loss, self.optimizer)
            # DeepSpeed averages gradients over data-parallel ranks; the loss is a sum.
            self.engine.backward(batch_loss * self.copies, scale_wrt_gas=False)
            if last and self.plain:
                norm = self._plain_norm()
            self.engine.step()
        applied = self.engine.was_step_applied()
        if norm is None:
            norm = float(self.engine.get_global_grad_norm() or 0.0) / loss_scale
        values = torch.stack([loss, tokens]).tolist()
        skipped = refusal(values[0], max_loss)
        self.veto.end_step(skipped is not None, applied, self.optimizer)
        if skipped is None and not applied:
            skipped = NON_FINITE_GRADIENTS
        return StepResult(values[0], norm, int(values[1]), skipped)

    def _plain_norm(self) -> float:
        """Gradient norm of fp32 stage 0, which DeepSpeed neither computes nor looks at."""
        norm = float(self.model.gradient_norm(self.engine.module))
        self.optimizer.overflow = not math.isfinite(norm)
        return norm

    def _loss_scale_of_norm(self) -> float:
        """What the reported norm is too large by: in fp16, stage 0 leaves the loss scale in."""
        if self.stage > 0 or self.setup.precision != "fp16":
            return 1.0
        return float(self.optimizer.loss_scale_config.cur_scale)

    def _loss(self, batch: MicroBatch) -> Tensor:
        return self.model.summed_loss(self.engine, to_device(batch, self.device))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """See `Engine.evaluate`."""
        tokens = global_tokens(micro_batches, self.device, self.model.data_group)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with hf.evaluating(self.engine):
            for batch in micro_batches:
                loss += self._loss(batch)
        dist.all_reduce(loss, group=self.model.data_group)
        return EvalResult((loss / tokens).item(), int(tokens.item()))

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.replicated_weights`."""
        if self.stage < 3:
            yield from self.engine.module.named_parameters()

    def save_state(self, folder: Path) -> None:
        """See `Engine.save_state`; writes DeepSpeed's own files."""
        if self._swaps:
            save_file(self._read_swapped(), self._swapped_file(folder))
        else:
            self.engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load_state(self, folder: Path) -> None:
        """See `Engine.load_state`."""
        if self._swaps:
            file = self._swapped_file(folder)
            try:
                shards = load_file(file)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
            self._write_swapped(shards)
            return
        path, _ = self.engine.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise CheckpointError(f"{folder} holds no DeepSpeed checkpoint")

    # DeepSpeed's own checkpoints do not bring back what was swapped to NVMe: a resumed run
    # silently goes on with other weights. So these states go through its debugging API.

    @property
    def _swaps(self) -> bool:
        layout = self.setup.layout
        return "nvme" in (layout.offload_optimizer, layout.offload_parameters)

    def _swapped_file(self, folder: Path) -> Path:
        return folder / f"rank-{self.setup.ranks.rank}.safetensors"

    def _read_swapped(self) -> dict[str, Tensor]:
        """This rank's shard of every parameter and moment, and the optimizer's step."""
        shards: dict[str, Tensor] = {}
        for name, parameter in self.engine.module.named_parameters():
            for key in SWAPPED_STATES:
                shard = self.optimizer.get_local_fp32_param(parameter, key)
                shards[f"{name}/{key}"] = shard.detach().to("cpu", copy=True)
        steps = [state["step"] for state in self._group_states()]
        return shards | {"step": torch.tensor(steps, dtype=torch.int64)}

    def _group_states(self) -> list[dict[str, Any]]:
        """AdamW's state of each group of shards."""
        groups = self.optimizer.fp32_partitioned_groups_flat
        return [self.optimizer.optimizer.state[weights] for weights in groups]

    def _write_swapped(self, shards: dict[str, Tensor]) -> None:
        """Put the shards back: first the states, then the compute weights made from them."""
        # The moments exist only after a first step; what it does is overwritten.
        tokens = torch.zeros(self.setup.layout.micro_batch, 2, dtype=torch.int64)
        batch = MicroBatch(tokens, tokens)
        self.train_step([batch] * self.setup.layout.gradient_accumulation, 0.0)
        for name, parameter in self.engine.module.named_parameters():
            for key in SWAPPED_STATES:
                self.optimizer.set_local_hp_param(shards[f"{name}/{key}"], parameter, key)
            full = self.optimizer.get_full_hp_param(parameter)
            with gathered([parameter], modifier_rank=0):
                parameter.data.copy_(full)
        for state, step in zip(self._group_states(), shards["step"].tolist(), strict=True):
            state["step"] = step

    def export_hf(self, folder: Path) -> None:
        """See `Engine.export_hf`."""
        state = self.model.full_state(self.engine.module)
        if self.setup.ranks.rank == 0:
            hf.save_folder(self.setup.model_config, state, folder)
        dist.barrier()

    def close(self) -> None:
        """See `Engine.close`."""
        self.engine.destroy()
        self.model.close()
        del self.engine, self.optimizer, self.model


@torch.no_grad()
def _undo_first_step(optimizer: Any) -> None:
    """Take back the AdamW step that DeepSpeed's 16-bit stage 0 does while it is built.

    Its constructor steps once on zero gradients to allocate the states, which decays the
    weights and leaves the bias correction one step ahead of every other stage.
    """
    optimizer.optimizer.state.clear()
    for group in optimizer.optimizer.param_groups:
        group.pop("step", None)  # where a fused AdamW counts
    if hasattr(optimizer, "fp32_groups_flat"):  # a fused AdamW has flat groups
        for master, weight in zip(
            optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True
        ):
            master.copy_(weight)
        return
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.copy_(weight)
