"""Engine `deepspeed`: a transformers model under DeepSpeed's ZeRO 0-3 and offload."""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as hf_initialization

from toolkit.engines.base import EvalResult, MicroBatch, StepResult
from toolkit.engines.distributed import global_tokens, gradient_norm, to_device
from toolkit.engines.setup import EngineSetup
from toolkit.errors import CheckpointError
from toolkit.models import huggingface as hf
from toolkit.models.weights import WeightSource

TAG = "state"
"""DeepSpeed's name for the one checkpoint inside the folder that we give it."""

SWAPPED_STATES = (None, "exp_avg", "exp_avg_sq")
"""DeepSpeed's keys of a shard's states: fp32 weights, first and second moment."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def import_deepspeed() -> Any:
    """DeepSpeed, quietly: its own INFO lines are not for our users.

    It would probe every operator with the compiler, and on a CPU compile a shared-memory
    all-reduce at its first use, for a minute or more without a word. gloo does that work.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


class DeepSpeedEngine:
    """A transformers model whose states DeepSpeed shards over the data-parallel ranks."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.device = setup.ranks.device
        self.world = setup.ranks.world
        self.stage = setup.layout.zero_stage
        deepspeed = import_deepspeed()
        deepspeed.init_distributed(
            dist_backend="nccl" if self.device.type == "cuda" else "gloo",
            auto_mpi_discovery=False,
            verbose=False,
        )
        model = self._build_model(deepspeed)
        if setup.layout.recompute == "full":
            hf.enable_recompute(model)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=hf.parameter_groups(model, setup.optimizer.weight_decay),
            config=setup.engine_config,
        )
        if self.stage == 0 and setup.precision != "fp32":
            _undo_first_step(self.optimizer)
        hf.restore_buffers(self.engine.module, setup.model_config)
        self.engine.train()

    def _build_model(self, deepspeed: Any) -> PreTrainedModel:
        """The model with its initial weights, sharded from the start under stage 3."""
        config, weights = self.setup.model_config, self.setup.weights
        dtype = DTYPES[self.setup.precision]
        if self.stage < 3:
            model = hf.empty_model(config, self.device, dtype)
            hf.fill(model, weights)
            return model
        sharded = deepspeed.zero.Init(config_dict_or_path=self.setup.engine_config)
        with hf_initialization.no_init_weights(), sharded:
            model = hf.new_model(config, dtype)
        model.tie_weights()
        for name, parameter in model.named_parameters():
            _fill_shard(deepspeed, name, parameter, weights)
        return model

    def train_step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> StepResult:
        """See `Engine.train_step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        tokens = global_tokens(micro_batches, self.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        norm: float | Tensor | None = None
        for batch in micro_batches:
            batch_loss = self._loss(batch) / tokens
            # DeepSpeed averages gradients over ranks; the loss is a sum over them.
            self.engine.backward(batch_loss * self.world, scale_wrt_gas=False)
            if self.engine.is_gradient_accumulation_boundary():
                norm = self._plain_norm()
            self.engine.step()
            loss += batch_loss.detach()
        dist.all_reduce(loss)
        if norm is None:
            norm = self.engine.get_global_grad_norm()
        skipped = not self.engine.was_step_applied()
        values = torch.stack([loss, tokens]).tolist()
        return StepResult(values[0], float(norm or 0.0), int(values[1]), skipped)

    def _plain_norm(self) -> Tensor | None:
        """Gradient norm of fp32 stage 0, which DeepSpeed does not compute itself."""
        if self.stage > 0 or self.setup.precision != "fp32":
            return None
        return gradient_norm(self.engine.module.parameters())

    def _loss(self, batch: MicroBatch) -> Tensor:
        return hf.summed_loss(self.engine, to_device(batch, self.device))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """See `Engine.evaluate`."""
        tokens = global_tokens(micro_batches, self.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with hf.evaluating(self.engine):
            for batch in micro_batches:
                loss += self._loss(batch)
        dist.all_reduce(loss)
        return EvalResult((loss / tokens).item(), int(tokens.item()))

    def save_state(self, folder: Path) -> None:
        """See `Engine.save_state`; writes DeepSpeed's own files."""
        if self._swaps:
            save_file(self._read_swapped(), self._swapped_file(folder))
        else:
            self.engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load_state(self, folder: Path) -> None:
        """See `Engine.load_state`."""
        if self._swaps:
            self._write_swapped(load_file(self._swapped_file(folder)))
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
        deepspeed = import_deepspeed()
        # The moments exist only after a first step; what it does is overwritten.
        tokens = torch.zeros(self.setup.layout.micro_batch, 2, dtype=torch.int64)
        batch = MicroBatch(tokens, tokens)
        self.train_step([batch] * self.setup.layout.gradient_accumulation, 0.0)
        for name, parameter in self.engine.module.named_parameters():
            for key in SWAPPED_STATES:
                self.optimizer.set_local_hp_param(shards[f"{name}/{key}"], parameter, key)
            full = self.optimizer.get_full_hp_param(parameter)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(full)
        for state, step in zip(self._group_states(), shards["step"].tolist(), strict=True):
            state["step"] = step

    def export_hf(self, folder: Path) -> None:
        """See `Engine.export_hf`. Under stage 3 one parameter is gathered at a time."""
        state = dict(self._full_state())
        if self.setup.ranks.rank == 0:
            hf.save_folder(self.setup.model_config, state, folder)
        dist.barrier()

    def _full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Names and full CPU copies on rank 0 (nothing on the other ranks)."""
        deepspeed = import_deepspeed()
        module = self.engine.module
        keep = self.setup.ranks.rank == 0
        for name, parameter in module.named_parameters():
            gathered = [parameter] if hasattr(parameter, "ds_id") else []
            with deepspeed.zero.GatheredParameters(gathered):
                if keep:
                    yield name, parameter.detach().to("cpu", copy=True)

    def close(self) -> None:
        """See `Engine.close`."""
        self.engine.destroy()
        del self.engine, self.optimizer


@torch.no_grad()
def _undo_first_step(optimizer: Any) -> None:
    """Take back the AdamW step that DeepSpeed's 16-bit stage 0 does while it is built.

    Its constructor steps once on zero gradients to allocate the states, which decays the
    weights and leaves the bias correction one step ahead of every other stage.
    """
    optimizer.optimizer.state.clear()
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.copy_(weight)


@torch.no_grad()
def _fill_shard(
    deepspeed: Any, name: str, parameter: nn.Parameter, weights: WeightSource
) -> None:
    """Give a ZeRO-3 parameter its initial value.

    A rank writes only its own shard, elements [rank·n, (rank+1)·n) of the flattened
    parameter (the last shard is padded). A shard that DeepSpeed moved to NVMe, quantized
    or keeps twice (ZeRO++) cannot be written in place: then rank 0 fills the gathered
    parameter, one at a time.
    """
    shard = parameter.ds_tensor  # type: ignore[attr-defined]
    numel = int(parameter.ds_numel)  # type: ignore[attr-defined]
    quantized = hasattr(shard, "ds_quant_scale")
    copied = getattr(parameter, "ds_secondary_tensor", None) is not None
    if shard.numel() == shard.ds_numel and not quantized and not copied:
        start = dist.get_rank() * shard.numel()
        stop = min(start + shard.numel(), numel)
        if start < stop:
            shard[: stop - start].copy_(weights.read(name, start, stop))
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if dist.get_rank() == 0:
            parameter.copy_(weights.read(name, 0, numel).view_as(parameter))
