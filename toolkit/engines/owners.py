"""Optimizers whose updates need whole tensors: each is computed by one rank, its owner.

A `UpdateRule` (`adafactor.py`, `adamw_8bit.py`, `muon.py`) states which tensors of the Hugging
Face checkpoint it updates, and how. Its elementwise part runs on the elements that a rank
holds, in any layout. The rest runs on the tensor's owner: the other holders send it their
rectangles of the gradient, and every holder gets back the same update. So the update of a
weight depends neither on the sharding of its tensor nor on its replicas.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.shards import (
    StateShard,
    block_numel,
    stored_values,
    whole_block,
    with_offsets,
)
from toolkit.engines import optimizer as adam
from toolkit.engines.adafactor import Adafactor
from toolkit.engines.adamw_8bit import AdamW8bit
from toolkit.engines.muon import Muon
from toolkit.engines.setup import EngineSetup
from toolkit.models.families.tensors import Block
from toolkit.models.matrices import EXCHANGED_AT_ONCE
from toolkit.recipe.schema import OptimizerSection


class UpdateRule(Protocol):
    """How whole tensors are updated: W ← W - lr·λ W - lr·rate · update."""

    moments: ClassVar[tuple[str, ...]]
    """Elementwise states, which every holder keeps for its elements."""
    sent: ClassVar[torch.dtype]
    """The dtype in which gradients are sent to the owner, and updates back."""
    by_replicas: ClassVar[bool]
    """Holders of a whole tensor update it locally, which costs less than sending it."""

    @property
    def states(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The states of the tensors that this rank owns, by tensor and quantity."""
        ...

    def takes(self, block: Block) -> bool:
        """Whether the rule updates the tensor of this block; AdamW updates all others."""
        ...

    def cost(self, shape: tuple[int, ...]) -> int:
        """Operations of `update`, used to balance owners."""
        ...

    def own(self, tensor: str, shape: tuple[int, ...], device: torch.device) -> None:
        """Allocate the states of a tensor that this rank owns."""
        ...

    def accumulate(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """Convert a holder's elements of the gradient to the owner's input, in place; `state`
        are the `moments`."""
        ...

    def update(self, tensor: str, whole: Tensor, step: int) -> Tensor:
        """On the owner: the update of a whole tensor, in dtype `sent`; steps count from 1."""
        ...

    def rate(self, shape: tuple[int, ...]) -> float:
        """Multiplier of a tensor's learning rate."""
        ...


RULES: dict[str, Callable[[OptimizerSection], UpdateRule]] = {
    "adafactor": Adafactor,
    "adamw_8bit": AdamW8bit,
    "muon": Muon,
}
"""By `optimizer.name`."""


def takes(rule: UpdateRule, blocks: Iterable[Block]) -> bool:
    """Whether the rule updates the parameter that consists of `blocks`."""
    return all(map(rule.takes, blocks))


@dataclass(frozen=True)
class _Tensor:
    """A checkpoint tensor and the ranks that hold its rectangles."""

    shape: tuple[int, ...]
    holders: tuple[tuple[int, Block], ...]
    """Every copy of every rectangle, with its rank."""
    owner: int

    @property
    def replicated(self) -> bool:
        """Whether every holder has all of it."""
        return all(block_numel(block) == prod(self.shape) for _, block in self.holders)

    @property
    def sources(self) -> Iterator[tuple[int, Block]]:
        """Each rectangle once, the owner's own copy before others'."""
        found: dict[Block, int] = {}
        for rank, block in self.holders:
            if block not in found or rank == self.owner:
                found[block] = rank
        return ((rank, block) for block, rank in found.items())


@dataclass(frozen=True)
class _Round:
    """This rank's part of one exchange: lists by rank, in the same order on both sides."""

    owned: Mapping[str, tuple[int, ...]]
    """The tensors that this rank updates, with their shapes."""
    sent: list[list[Block]]
    """Its rectangles to send to each owner."""
    gathered: list[list[Block]]
    """The rectangles of its own tensors that it receives from each rank."""
    returned: list[list[Block]]
    """The rectangles of its own tensors that each rank holds."""
    received: list[list[Block]]
    """Its rectangles whose result it receives from each owner."""


class Exchange:
    """Updates of tensors that are sharded over ranks or replicated."""

    def __init__(self, blocks: Sequence[Block], rule: UpdateRule, device: torch.device) -> None:
        """Plan the exchange for this rank's `blocks`, as stored; collective."""
        self.rank, self.rule, self.device = dist.get_rank(), rule, device
        held: list[list[Block]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(held, list(blocks))
        tensors = _owned(held, rule)
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.owned = {name for name, one in tensors.items() if one.owner == self.rank}
        replicated = {n for n, one in tensors.items() if rule.by_replicas and one.replicated}
        self.alone = [block for block in blocks if block.tensor in replicated]
        """Whole tensors that every holder, including this rank, updates."""
        for name in self.owned | {block.tensor for block in self.alone}:
            rule.own(name, self.shapes[name], device)
        sent = {name: one for name, one in tensors.items() if name not in replicated}
        self.rounds = [self._round(part) for part in _rounds(sent, len(held))]

    def _round(self, tensors: Mapping[str, _Tensor]) -> _Round:
        me, ranks = self.rank, range(dist.get_world_size())
        owned = {name: one for name, one in tensors.items() if one.owner == me}

        def others(copies: Iterable[tuple[int, Block]], rank: int) -> list[Block]:
            return [block for holder, block in copies if holder == rank]

        def of(owner: int) -> list[_Tensor]:
            return [one for one in tensors.values() if one.owner == owner]

        return _Round(
            {name: one.shape for name, one in owned.items()},
            [[b for one in of(rank) for b in others(one.sources, me)] for rank in ranks],
            [[b for one in owned.values() for b in others(one.sources, r)] for r in ranks],
            [[b for one in owned.values() for b in others(one.holders, r)] for r in ranks],
            [[b for one in of(rank) for b in others(one.holders, me)] for rank in ranks],
        )

    def run(self, held: Mapping[Block, Tensor], step: int) -> None:
        """Replace this rank's rectangles of the gradients, [rows, columns] or [rows], by those
        of the updates of step `step`; collective."""
        for block in self.alone:
            held[block].copy_(self.rule.update(block.tensor, held[block], step))
        for part in self.rounds:
            wholes = {
                name: torch.empty(shape, dtype=self.rule.sent, device=self.device)
                for name, shape in part.owned.items()
            }
            sent = [[held[block] for block in blocks] for blocks in part.sent]
            for block, values in self._all_to_all(sent, part.gathered):
                _rectangle(wholes, block).copy_(values)
            for name, whole in wholes.items():
                wholes[name] = self.rule.update(name, whole, step)
            results = [[_rectangle(wholes, b) for b in blocks] for blocks in part.returned]
            for block, values in self._all_to_all(results, part.received):
                held[block].copy_(values)

    def _all_to_all(
        self, outgoing: list[list[Tensor]], incoming: list[list[Block]]
    ) -> list[tuple[Block, Tensor]]:
        """Send each rank its tensors; returns the received blocks with their values."""
        parts = [part.reshape(-1).to(self.rule.sent) for parts in outgoing for part in parts]
        empty = torch.empty(0, dtype=self.rule.sent, device=self.device)
        sent = torch.cat([empty, *parts])
        sizes = [sum(map(block_numel, blocks)) for blocks in incoming]
        received = empty.new_empty(sum(sizes))
        sent_sizes = [sum(part.numel() for part in parts) for parts in outgoing]
        dist.all_to_all_single(received, sent, sizes, sent_sizes)
        arrived = with_offsets([block for blocks in incoming for block in blocks])
        return [(block, stored_values(block, offset, received)) for block, offset in arrived]


def _owned(held: Sequence[Sequence[Block]], rule: UpdateRule) -> dict[str, _Tensor]:
    """The tensors whose rectangles are `held` by the ranks, the most expensive first. The owner
    is the holder with the least work so far."""
    copies: dict[str, list[tuple[int, Block]]] = {}
    for rank, blocks in enumerate(held):
        for block in blocks:
            copies.setdefault(block.tensor, []).append((rank, block))
    shapes = {name: _shape([block for _, block in found]) for name, found in copies.items()}
    load = [0] * len(held)
    tensors = {}
    costs = {name: rule.cost(shape) for name, shape in shapes.items()}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owner = min({rank for rank, _ in copies[name]}, key=lambda rank: (load[rank], rank))
        load[owner] += costs[name]
        tensors[name] = _Tensor(shapes[name], tuple(copies[name]), owner)
    return tensors


def _shape(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The shape of the tensor covered by these rectangles, which may contain duplicates."""
    rows = max(block.rows[1] for block in blocks)
    ends = [block.columns[1] for block in blocks if block.columns is not None]
    whole = (rows, max(ends)) if ends else (rows,)
    complete = sum(map(block_numel, set(blocks))) == prod(whole)
    assert complete, f"the ranks hold every element of {blocks[0].tensor} in one rectangle"
    return whole


def _rounds(tensors: Mapping[str, _Tensor], world: int) -> list[dict[str, _Tensor]]:
    """The tensors split into parts that need only small buffers on every rank."""
    parts: list[dict[str, _Tensor]] = []
    load = [EXCHANGED_AT_ONCE] * world
    for name, tensor in tensors.items():
        if max(load) >= EXCHANGED_AT_ONCE:
            parts.append({})
            load = [0] * world
        parts[-1][name] = tensor
        load[tensor.owner] += prod(tensor.shape)
        for rank, block in tensor.holders:
            load[rank] += block_numel(block)
            load[tensor.owner] += block_numel(block)  # the copy of the result that it sends
    return parts


def _rectangle(wholes: Mapping[str, Tensor], block: Block) -> Tensor:
    rows, columns = block.steps
    whole = wholes[block.tensor][slice(*block.rows, rows)]
    return whole if block.columns is None else whole[:, slice(*block.columns, columns)]


@dataclass(frozen=True)
class _Held:
    """A rectangle of a tensor inside an optimizer's parameter."""

    block: Block
    offset: int
    """Its first element in this rank's memory of the parameter."""

    def of(self, parameter: Tensor) -> Tensor:
        """Its elements of the parameter, or of a tensor with the same layout, as stored."""
        return stored_values(self.block, self.offset, _local(parameter).view(-1))


class OwnerOptimizer(torch.optim.AdamW):
    """A rule for the groups whose `owned` is true, AdamW for all others.

    A group's parameters may be whole, sharded or flattened together. Before `bind` is called,
    the rule's parameters are not updated.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSection) -> None:
        super().__init__(
            groups,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.units: dict[Tensor, Unit] = {}
        """By parameter, the unit that is updated together."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters of the groups; collective unless `Unit.run_by_engine`."""
        groups = self.param_groups
        owned = [(p, g) for g in groups if g["owned"] for p in g["params"] if p in self.units]
        for unit in dict.fromkeys(self.units[parameter] for parameter, _ in owned):
            if not unit.run_by_engine:
                unit.compute()
        for parameter, group in owned:
            self._update(parameter, group)
        self.param_groups = [group for group in groups if not group["owned"]]
        super().step()
        self.param_groups = groups

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Decay the weights and subtract the update."""
        rate, unit = group["lr"], self.units[parameter]
        assert parameter.grad is not None, "computed"
        _local(parameter).mul_(1 - rate * group["weight_decay"])
        for held in unit.held[parameter]:
            shape = unit.exchange.shapes[held.block.tensor]
            adjusted = rate * unit.rule.rate(shape)
            held.of(parameter).add_(held.of(parameter.grad), alpha=-adjusted)
        self.state[parameter]["step"] += 1


def new_optimizer(
    groups: Iterable[dict[str, Any]],
    placed: Iterable[tuple[nn.Parameter, Iterable[Block]]],
    settings: OptimizerSection,
) -> OwnerOptimizer:
    """The recipe's optimizer, with the rule's parameters in separate groups; `placed` are the
    model's parameters with their checkpoint tensors."""
    rule = RULES[settings.name](settings)
    taken = {parameter for parameter, blocks in placed if takes(rule, blocks)}
    found = []
    for group in groups:
        for owned in (True, False):
            params = [p for p in group["params"] if (p in taken) == owned]
            found += [{**group, "params": params, "owned": owned}] if params else []
    return OwnerOptimizer(found, settings)


class Unit:
    """Parameters that are updated in one exchange."""

    run_by_engine = False
    """True: the engine calls `compute`, before all optimizers' steps; otherwise a step does."""

    def __init__(
        self,
        owners: Mapping[Tensor, OwnerOptimizer],
        held: Mapping[Tensor, list[_Held]],
        exchange: Exchange,
    ) -> None:
        self.owners = owners
        """The parameters, with the optimizers that update them."""
        self.held = held
        self.exchange = exchange
        self.rule = exchange.rule
        for parameter, optimizer in owners.items():
            optimizer.units[parameter] = self

    @torch.no_grad()
    def compute(self) -> None:
        """Replace the gradients by updates, in place; collective."""
        rectangles, step = {}, 0
        for parameter, optimizer in self.owners.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient, state = parameter.grad, optimizer.state[parameter]
            moments = {name: _local(state[name]) for name in self.rule.moments}
            self.rule.accumulate(_local(gradient), moments)
            step = step or int(state["step"]) + 1
            for one in self.held[parameter]:
                rectangles[one.block.stored] = one.of(gradient)
        self.exchange.run(rectangles, step)


def owner_shards(optimizers: Iterable[object]) -> Iterator[StateShard]:
    """The states that this rank keeps of the tensors that it owns."""
    found = [one for one in optimizers if isinstance(one, OwnerOptimizer)]
    for unit in dict.fromkeys(unit for one in found for unit in one.units.values()):
        for tensor, states in unit.rule.states.items():
            for quantity, values in states.items():
                block = whole_block(tensor, values.shape)
                mine = tensor in unit.exchange.owned
                yield StateShard([block], {quantity: values}, saved_here=mine)


def owned_by(optimizer: OwnerOptimizer) -> dict[Tensor, OwnerOptimizer]:
    """The parameters that an optimizer's groups have for its rule."""
    groups = [group for group in optimizer.param_groups if group["owned"]]
    return {parameter: optimizer for group in groups for parameter in group["params"]}


def bind(
    owners: Mapping[Tensor, OwnerOptimizer],
    state: Callable[[], Iterator[StateShard]],
    setup: EngineSetup,
    *,
    apart: bool = False,
) -> list[Unit]:
    """Determine the tensors of the rule's parameters, and plan their updates; collective.

    `state` is the engine's: its fp32 weights are parts of the parameters, or all of them.
    `apart`: each parameter has a separate step on all ranks, in the same order.
    """
    new_rule = partial(RULES[setup.optimizer.name], setup.optimizer)
    for parameter in owners:
        adam.moments(owners[parameter], parameter, kept=new_rule().moments)
    held = _held_in(owners, state(), new_rule())
    units = []
    for some in [{p: owners[p]} for p in owners] if apart else [owners]:
        blocks = [one.block.stored for parameter in some for one in held[parameter]]
        exchange = Exchange(blocks, new_rule(), setup.ranks.device)
        units.append(Unit(some, held, exchange))
    return units


def _held_in(
    parameters: Iterable[Tensor], state: Iterable[StateShard], rule: UpdateRule
) -> dict[Tensor, list[_Held]]:
    """The rectangles of the rule's tensors in this rank's memory of each parameter."""
    found: dict[Tensor, list[_Held]] = {parameter: [] for parameter in parameters}
    starts = sorted(
        ((_local(parameter).data_ptr(), parameter) for parameter in parameters),
        key=lambda one: one[0],
    )
    for shard in state:
        if not starts or not shard.blocks or not takes(rule, shard.blocks):
            continue
        address = shard.get("weight").data_ptr()
        start, parameter = starts[bisect(starts, address, key=lambda one: one[0]) - 1]
        first = (address - start) // torch.float32.itemsize
        if not 0 <= first < _local(parameter).numel():
            continue  # does not train
        for block, offset in with_offsets(shard.blocks):
            found[parameter].append(_Held(block, first + offset))
    return found


def _local(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor, without history."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
