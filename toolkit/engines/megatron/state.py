"""Where megatron-core keeps the fp32 weights and moments of a parameter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

from toolkit.checkpoint.shards import StateShard, cut
from toolkit.engines import adamw as adam
from toolkit.models.families import MegatronModel
from toolkit.models.megatron import weights
from toolkit.models.megatron.model import GPTChunk


@dataclass(frozen=True)
class _Master:
    """The fp32 weights of a parameter, or of the range of its elements that this rank
    updates."""

    adam: torch.optim.Optimizer
    weight: Tensor
    start: int
    """The first element, in the flattened parameter."""
    distributed: bool
    """Every data-parallel rank has different elements."""


def adams(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The AdamW optimizers of this rank, without those that have nothing to update."""
    parts = optimizer.chained_optimizers
    return [part.optimizer for part in parts if part.optimizer is not None]


def state(
    chunks: Sequence[GPTChunk], model: MegatronModel, optimizer: Any
) -> Iterator[StateShard]:
    """See `Engine.state`."""
    masters = dict(_masters(optimizer))
    yield from _buffers(chunks, model)
    for index, shard in enumerate(weights.shards(chunks, model)):
        master = masters.get(shard.parameter)
        copies, copy = weights.copies(shard)
        mine = index % copies == copy
        if not shard.parameter.requires_grad:
            saved_here = mine and weights.saved_here(shard)
            yield StateShard(shard.blocks, {"weight": shard.parameter}, saved_here=saved_here)
            continue
        if master is None:
            continue  # other data-parallel ranks have all of it
        values = adam.moments(master.adam, master.weight)
        mine = mine or master.distributed
        yield StateShard(
            cut(shard.blocks, master.start, master.start + master.weight.numel()),
            values,
            saved_here=mine and weights.saved_here(shard),
        )


def _buffers(chunks: Sequence[GPTChunk], model: MegatronModel) -> Iterator[StateShard]:
    """The correction biases, which no optimizer updates."""
    tensor = parallel_state.get_tensor_model_parallel_rank()
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for buffer, block in weights.buffers(chunks, model):
        yield StateShard([block], {"weight": buffer}, saved_here=tensor == copy == 0)


def _masters(optimizer: Any) -> Iterator[tuple[nn.Parameter, _Master]]:
    """The model's parameters and what this rank's optimizer updates instead of them."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, order) in part.model_param_group_index_map.items():
                weight = part.optimizer.param_groups[group]["params"][order]
                start = part._get_model_param_range_map(parameter)["param"].start
                yield parameter, _Master(part.optimizer, weight, start, distributed=True)
            continue
        for parameter, weight in _whole_masters(part):
            yield parameter, _Master(part.optimizer, weight, 0, distributed=False)


def _whole_masters(part: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Pairs of a parameter and its fp32 weights. In fp32 training they are the same."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for halves, masters in zip(
            part.float16_groups, part.fp32_from_float16_groups, strict=True
        ):
            yield from zip(halves, masters, strict=True)
        for group in part.fp32_from_fp32_groups:
            yield from zip(group, group, strict=True)
        return
    for group in part.optimizer.param_groups:
        yield from zip(group["params"], group["params"], strict=True)


def loss_scale(optimizer: Any) -> dict[str, Any] | None:
    """The dynamic loss scaler's state under fp16. None otherwise.

    The scale is saved for the mean loss over a rank's tokens, as in other engines: here it is
    for a sum (`config.py`), and smaller by `min_scale`.
    """
    scaler = getattr(optimizer.chained_optimizers[0], "grad_scaler", None)
    if scaler is None:
        return None
    counts = {"growth": scaler._growth_tracker, "hysteresis": scaler._hysteresis_tracker}
    return {"scale": float(scaler.scale / scaler.min_scale), "detail": counts}


def set_loss_scale(optimizer: Any, saved: dict[str, Any], device: torch.device) -> None:
    """Restore the saved scale, and its counts if megatron-core saved them."""
    scaler = optimizer.chained_optimizers[0].grad_scaler
    scaler._scale = torch.tensor([saved["scale"]], device=device) * scaler.min_scale
    if saved["detail"].keys() == {"growth", "hysteresis"}:
        scaler._growth_tracker = saved["detail"]["growth"]
        scaler._hysteresis_tracker = saved["detail"]["hysteresis"]
