"""Where DeepSpeed keeps the fp32 weights and moments of a parameter, stage by stage."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.checkpoint.shards import QUANTITIES, StateShard, cut
from toolkit.engines import adamw as adam
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
    """Stage 0: every one of `copies` replicas holds all. Replica `copy` writes its share."""
    for index, (parameter, blocks, saved_here) in enumerate(placed):
        mine = saved_here and index % copies == copy
        yield StateShard(blocks, adam.states(optimizer, parameter), saved_here=mine)


def partitions(optimizer: Any, placed: Placed, copies: int, copy: int) -> Iterator[StateShard]:
    """Stages 1 and 2: this rank holds a range of each parameter's elements, or none. All
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
    """Stage 3: the flat fp32 weights of the groups that owners update. Between two steps the
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
    """Set the moments of the shards to those of an optimizer before its first step."""
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
    """A stage-3 shard of a weight that does not train. Where it is offloaded to NVMe, read from
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
    state = scaler_state(optimizer)
    numbers = {k: v for k, v in state.items() if isinstance(v, int | float | bool)}
    return {"scale": float(state["cur_scale"]), "detail": numbers}


def set_loss_scale(optimizer: Any, saved: dict[str, Any]) -> None:
    """Restore the saved scale, and its counts if they are of the same kind."""
    state = scaler_state(optimizer)
    if saved["detail"].keys() == loss_scale(optimizer)["detail"].keys():
        state.update(saved["detail"])
    state["cur_scale"] = saved["scale"]


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """The attributes of the loss scaler. Empty without one."""
    return vars(optimizer.loss_scaler) if hasattr(optimizer, "loss_scaler") else {}


@torch.no_grad()
def follow_masters(optimizer: Any, stage: int) -> None:
    """Copy the fp32 masters to the weights that the model computes with, as DeepSpeed's step
    does. In stage 0 they are the same."""
    if stage < 3:
        optimizer.update_lp_params()
    else:
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()
