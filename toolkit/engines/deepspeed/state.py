"""Where DeepSpeed keeps the fp32 weights and moments of a parameter, stage by stage."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.checkpoint.shards import QUANTITIES, StateShard, cut
from toolkit.engines import optimizer as adam
from toolkit.models.families.tensors import Block

SWAPPED_KEYS = {"weight": None, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""DeepSpeed's names for a shard's states that are swapped to NVMe."""


class PlacedParameter(NamedTuple):
    """A parameter of the model and the checkpoint rectangles that it is made of."""

    parameter: nn.Parameter
    blocks: Sequence[Block]
    saved_here: bool
    """False on all but one of the model-parallel ranks that hold the same parameter."""


Placed = Iterable[PlacedParameter]


def whole_parameters(
    optimizer: Any, placed: Placed, copies: int, copy: int
) -> Iterator[StateShard]:
    """Stage 0: every one of `copies` replicas holds all; replica `copy` writes its share."""
    masters = _stage_0_masters(optimizer)
    for index, (parameter, blocks, saved_here) in enumerate(placed):
        weight, values = masters(parameter)
        moments = {name: _part(parameter, weight, flat) for name, flat in values.items()}
        yield StateShard(blocks, moments, saved_here=saved_here and index % copies == copy)


def _stage_0_masters(optimizer: Any) -> Callable[[nn.Parameter], Any]:
    """Parameter → position of its fp32 weight, and the tensors that hold it and its moments."""
    inner = getattr(optimizer, "optimizer", optimizer)
    found: dict[int, Any] = {}
    if hasattr(optimizer, "fp32_groups_flat"):  # 16 bits with a fused AdamW
        for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            offset = 0
            for parameter in group:
                found[id(parameter)] = offset, flat
                offset += parameter.numel()
    elif hasattr(optimizer, "fp32_groups"):  # 16 bits with any other
        for masters, group in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for master, parameter in zip(masters, group, strict=True):
                found[id(parameter)] = 0, master

    def of(parameter: nn.Parameter) -> Any:
        if id(parameter) not in found:  # fp32, or frozen
            return 0, adam.states(inner, parameter)
        offset, master = found[id(parameter)]
        return offset, adam.moments(inner, master)

    return of


def _part(parameter: nn.Parameter, offset: int, holder: Tensor) -> Tensor:
    """The elements of `holder`, a flat group or the parameter's own, that are the parameter."""
    return holder.detach().view(-1)[offset : offset + parameter.numel()]


def partitions(optimizer: Any, placed: Placed, copies: int, copy: int) -> Iterator[StateShard]:
    """Stages 1 and 2: this rank holds a range of each parameter's elements, or none; all
    `copies` replicas hold whole frozen parameters, and replica `copy` writes its share of
    them."""
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if masters is None:  # stage 1 in bf16 has a separate optimizer
        masters = optimizer.fp32_groups_flat_partition
    for weight in masters:  # also one of which this rank holds only padding: its step counts
        adam.moments(optimizer.optimizer, weight)
    for index, (parameter, blocks, saved_here) in enumerate(placed):
        if not parameter.requires_grad:
            mine = saved_here and index % copies == copy
            yield StateShard(blocks, {"weight": parameter}, saved_here=mine)
            continue
        fragment = parameter._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:
            continue
        group = masters[fragment.param_group_index]
        inside = fragment.hp_fragment_address
        values = {
            name: flat.detach()[inside.start : inside.start + inside.numel]
            for name, flat in adam.moments(optimizer.optimizer, group).items()
        }
        first = fragment.lp_fragment_address.start
        held = cut(blocks, first, first + inside.numel)
        yield StateShard(held, values, saved_here=saved_here)


def stage_3_owned(optimizer: Any) -> Iterator[Tensor]:
    """Stage 3: the flat fp32 weights of the groups that owners update; between two steps the
    groups themselves are empty."""
    groups = optimizer.optimizer.param_groups
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        if groups[optimizer.sub_group_to_group_id[index]]["owned"]:
            yield flat


def stage_3_shards(optimizer: Any, placed: Placed, copy: int) -> Iterator[StateShard]:
    """Stage 3: data-parallel rank `copy` holds the same share of every parameter."""
    for parameter, blocks, saved_here in placed:
        size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        held = cut(blocks, copy * size, (copy + 1) * size)
        if not parameter.requires_grad:
            yield FrozenShard(parameter, held, saved_here=saved_here)
            continue
        if optimizer.swap_optimizer:
            yield SwappedShard(optimizer, parameter, held, saved_here=saved_here)
            continue
        group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
        flat = adam.moments(optimizer.optimizer, optimizer.fp32_partitioned_groups_flat[group])
        values = {name: value.detach()[offset : offset + numel] for name, value in flat.items()}
        yield StateShard(held, values, saved_here=saved_here)


def zeroed(shards: Iterator[StateShard]) -> Iterator[StateShard]:
    """The same shards with the moments of an optimizer before its first step."""
    for shard in shards:
        for quantity in shard.quantities[1:]:
            shard.put(quantity, torch.zeros_like(shard.get(quantity)))
        yield shard


class SwappedShard(StateShard):
    """A stage-3 shard whose states are on NVMe outside the step, read and written one by one.

    DeepSpeed's own checkpoints do not restore swapped states: a resumed run would silently
    continue with other weights.
    """

    in_memory = False
    quantities = QUANTITIES

    def __init__(
        self, optimizer: Any, parameter: nn.Parameter, blocks: Any, *, saved_here: bool
    ) -> None:
        super().__init__(blocks, {}, saved_here=saved_here)
        self._optimizer = optimizer
        self._parameter = parameter

    def get(self, quantity: str) -> Tensor:
        """A copy."""
        key = SWAPPED_KEYS[quantity]
        shard: Tensor = self._optimizer.get_local_fp32_param(self._parameter, key)
        return shard.detach().to("cpu", copy=True).view(-1)

    def put(self, quantity: str, values: Tensor) -> None:
        whole = self.get(quantity)
        whole[: values.numel()] = values
        self._optimizer.set_local_hp_param(whole, self._parameter, SWAPPED_KEYS[quantity])


class FrozenShard(StateShard):
    """A stage-3 shard of a weight that does not train; where it is offloaded to NVMe, read from
    there. Values written to it are ignored: the model was built with them."""

    in_memory = False
    quantities = QUANTITIES[:1]

    def __init__(self, parameter: nn.Parameter, blocks: Any, *, saved_here: bool) -> None:
        super().__init__(blocks, {}, saved_here=saved_here)
        self._parameter: Any = parameter

    def get(self, quantity: str) -> Tensor:
        """A copy."""
        assert quantity in self.quantities
        shard = self._parameter.ds_tensor
        # The placeholder of a swapped shard has another type.
        values = torch.empty(shard.ds_numel, dtype=self._parameter.dtype)
        if shard.status.name == "AVAILABLE":
            values.copy_(shard.detach().view(-1))
        else:
            self._parameter.nvme_swapper.swap_into_buffer(self._parameter, values)
        return values.float()

    def put(self, quantity: str, values: Tensor) -> None:
        """Nothing."""


def loss_scale(optimizer: Any) -> dict[str, Any]:
    """The state of DeepSpeed's loss scaler."""
    scaler = _scaler(optimizer)
    numbers = {k: v for k, v in vars(scaler).items() if isinstance(v, int | float | bool)}
    return {"scale": float(scaler.cur_scale), "detail": numbers}


def set_loss_scale(optimizer: Any, saved: dict[str, Any]) -> None:
    """Restore the saved scale, and its counts if they are of the same kind."""
    scaler = _scaler(optimizer)
    if saved["detail"].keys() == loss_scale(optimizer)["detail"].keys():
        vars(scaler).update(saved["detail"])
    scaler.cur_scale = saved["scale"]


def _scaler(optimizer: Any) -> Any:
    """Stage 0 keeps the numbers in its configuration, the other stages in a scaler."""
    return getattr(optimizer, "loss_scale_config", None) or optimizer.loss_scaler


def undo_first_step(optimizer: Any) -> None:
    """Forget the AdamW step that DeepSpeed's 16-bit stage 0 runs in its constructor.

    Its constructor steps once on zero gradients to allocate the states, which decays the fp32
    weights, filled afterwards, and leaves the bias correction one step ahead of every other
    stage.
    """
    optimizer.optimizer.state.clear()
    for group in optimizer.optimizer.param_groups:
        group.pop("step", None)  # where a fused AdamW counts


def _stage_0_pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """fp32 masters and weights of stage 0 in 16 bits; a fused AdamW has flat groups."""
    if hasattr(optimizer, "fp32_groups_flat"):
        yield from zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True)
        return
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        yield from zip(masters, weights, strict=True)


@torch.no_grad()
def follow_masters(optimizer: Any, stage: int) -> None:
    """Give the weights that the model computes with the values of their fp32 masters, as the
    end of DeepSpeed's step does; not for stage 0 in fp32, where they are the same."""
    if stage == 0:
        for master, weight in _stage_0_pairs(optimizer):
            weight.copy_(master)
    elif stage < 3:
        optimizer.update_lp_params()
    else:
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()
