"""Optimizers whose updates need whole tensors: each is computed by one rank, its owner.

`WholeTensors` (`optimizers/base.py`) states which tensors of the Hugging Face checkpoint an
optimizer updates, its `UpdateRule` how. The rule's elementwise part runs on the elements that a
rank holds, in any layout. The rest runs on the tensor's owner: the other holders send it their
rectangles of the gradient, and every holder gets back the same update. So the update of a
weight depends neither on the sharding of its tensor nor on its replicas.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.shards import (
    StateShard,
    block_numel,
    block_shape,
    joint_shape,
    stored_values,
    whole_block,
    with_offsets,
)
from toolkit.engines import adamw as adam
from toolkit.engines.setup import EngineSetup
from toolkit.models.families.tensors import Block
from toolkit.optimizers.base import EXCHANGED_AT_ONCE, WholeTensors
from toolkit.recipe.schema import OptimizerSection
from toolkit.registry import load


class UpdateRule:
    """How whole tensors are updated: W ← W - lr·λ W - lr·rate · update."""

    def __init__(self, settings: OptimizerSection) -> None:
        self.settings = settings

    def accumulate(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """Convert a holder's elements of the gradient to the owner's input, in place. `state`
        are the `WholeTensors.moments`."""

    def update(self, whole: Tensor, states: Mapping[str, Tensor], step: int) -> Tensor:  # noqa: ARG002
        """On the owner: the update of a tensor of which `whole` was accumulated, with these
        states, in dtype `WholeTensors.sent`. Steps count from 1."""
        return whole

    def rate(self, shape: Sequence[int]) -> float:  # noqa: ARG002
        """Multiplier of a tensor's learning rate."""
        return 1.0


def whole_of(settings: OptimizerSection) -> WholeTensors:
    """The whole tensors that the recipe's optimizer updates. Not for AdamW, which has none."""
    whole = settings.kind.whole
    assert whole is not None, f"{settings.name} updates whole tensors"
    return whole


def takes(whole: WholeTensors, blocks: Iterable[Block]) -> bool:
    """Whether the rule updates the parameter that consists of `blocks`."""
    return all(whole.takes(block.tensor, len(block_shape(block))) for block in blocks)


class _Tensor(NamedTuple):
    """A checkpoint tensor and the ranks that hold its rectangles."""

    shape: tuple[int, ...]
    holders: list[tuple[int, Block]]
    """Every copy of every rectangle, with its rank."""
    owner: int

    @property
    def replicated(self) -> bool:
        """Whether every holder has all of it."""
        return all(block_numel(block) == prod(self.shape) for _, block in self.holders)

    @property
    def sources(self) -> list[tuple[int, Block]]:
        """Each rectangle once, the owner's own copy before others'."""
        ranks: dict[Block, int] = {}
        for rank, block in self.holders:
            if block not in ranks or rank == self.owner:
                ranks[block] = rank
        return [(rank, block) for block, rank in ranks.items()]


class _Transfer:
    """Rectangles that this rank sends and receives, by rank, in the same order on both
    sides."""

    def __init__(self, moves: Iterable[tuple[int, int, Block]]) -> None:
        """`moves` lists the moves of all ranks: source, target, rectangle."""
        me, world = dist.get_rank(), dist.get_world_size()
        self.sent: list[list[Block]] = [[] for _ in range(world)]
        self.received: list[list[Block]] = [[] for _ in range(world)]
        for source, target, block in moves:
            if source == me:
                self.sent[target].append(block)
            if target == me:
                self.received[source].append(block)

    def run(
        self, values: Callable[[Block], Tensor], into: Callable[[Block], Tensor], like: Tensor
    ) -> None:
        """Copy the rectangles, in the dtype of `like`. Collective."""
        outgoing = [values(b).reshape(-1).to(like.dtype) for b in chain(*self.sent)]
        incoming = [sum(map(block_numel, blocks)) for blocks in self.received]
        received = like.new_empty(sum(incoming))
        sizes = [sum(map(block_numel, blocks)) for blocks in self.sent]
        dist.all_to_all_single(received, torch.cat([like, *outgoing]), incoming, sizes)
        for block, offset in with_offsets([*chain(*self.received)]):
            into(block).copy_(stored_values(block, offset, received))


def _owned(held: Sequence[Sequence[Block]]) -> dict[str, _Tensor]:
    """The tensors whose rectangles are `held` by the ranks, the largest first. The owner is the
    holder that owns the fewest elements so far."""
    holders: dict[str, list[tuple[int, Block]]] = {}
    for rank, blocks in enumerate(held):
        for block in blocks:
            holders.setdefault(block.tensor, []).append((rank, block))
    shapes = {name: _shape([block for _, block in pairs]) for name, pairs in holders.items()}
    owned = [0] * len(held)
    tensors = {}
    for name in sorted(shapes, key=lambda name: (-prod(shapes[name]), name)):
        owner = min({rank for rank, _ in holders[name]}, key=lambda rank: (owned[rank], rank))
        owned[owner] += prod(shapes[name])
        tensors[name] = _Tensor(shapes[name], holders[name], owner)
    return tensors


def _shape(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The shape of the tensor covered by these rectangles, which may contain duplicates."""
    whole = joint_shape(blocks)
    complete = sum(map(block_numel, set(blocks))) == prod(whole)
    assert complete, f"the ranks hold every element of {blocks[0].tensor} in one rectangle"
    return whole


def _rounds(tensors: Mapping[str, _Tensor], world: int) -> list[dict[str, _Tensor]]:
    """The tensors split into parts that need only small buffers on every rank."""
    parts: list[dict[str, _Tensor]] = []
    buffered = [EXCHANGED_AT_ONCE] * world
    for name, tensor in tensors.items():
        if max(buffered) >= EXCHANGED_AT_ONCE:
            parts.append({})
            buffered = [0] * world
        parts[-1][name] = tensor
        buffered[tensor.owner] += prod(tensor.shape)
        for rank, block in tensor.holders:
            buffered[rank] += block_numel(block)
            buffered[tensor.owner] += block_numel(block)  # the copy of the result that it sends
    return parts


def _rectangle(wholes: Mapping[str, Tensor], block: Block) -> Tensor:
    rows, columns = block.steps
    whole = wholes[block.tensor][slice(*block.rows, rows)]
    return whole if block.columns is None else whole[:, slice(*block.columns, columns)]


@dataclass(frozen=True)
class _Piece:
    """A rectangle of a tensor inside an optimizer's parameter."""

    block: Block
    offset: int
    """The first element in this rank's memory of the parameter."""

    def of(self, parameter: Tensor) -> Tensor:
        """The elements of the parameter, or of a tensor with the same layout, as stored."""
        return stored_values(self.block, self.offset, local(parameter).view(-1))


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
        """The unit in which each parameter is updated."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters of the groups. Collective unless `Unit.run_by_engine`."""
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
        local(parameter).mul_(1 - rate * group["weight_decay"])
        for held in unit.held[parameter]:
            adjusted = rate * unit.rule.rate(unit.shapes[held.block.tensor])
            held.of(parameter).add_(held.of(parameter.grad), alpha=-adjusted)
        self.state[parameter]["step"] += 1


def owned_of(
    placed: Iterable[tuple[nn.Parameter, Iterable[Block]]], settings: OptimizerSection
) -> set[nn.Parameter]:
    """The parameters that the recipe's optimizer updates as whole tensors. `placed` are the
    model's parameters with their checkpoint tensors."""
    whole = settings.kind.whole
    if whole is None:
        return set()
    return {parameter for parameter, blocks in placed if takes(whole, blocks)}


class Unit:
    """Parameters that are updated together in one exchange. Their tensors are sharded over
    ranks or replicated."""

    run_by_engine = False
    """Whether the engine calls `compute` before all optimizers' steps, not a step."""

    def __init__(
        self,
        owners: Mapping[Tensor, OwnerOptimizer],
        held: Mapping[Tensor, list[_Piece]],
        settings: OptimizerSection,
        device: torch.device,
    ) -> None:
        """Plan the exchange of what this rank has `held` of the parameters. Collective."""
        self.owners = owners
        """The parameters, with the optimizers that update them."""
        self.held = held
        self.whole = whole_of(settings)
        self.rule: UpdateRule = load(self.whole.rule)(settings)
        for parameter, optimizer in owners.items():
            optimizer.units[parameter] = self
        blocks = [one.block.stored for parameter in owners for one in held[parameter]]
        everyones: list[list[Block]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, blocks)
        tensors = _owned(everyones)
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.owned = {name for name, one in tensors.items() if one.owner == dist.get_rank()}
        by_replicas = self.whole.by_replicas
        replicated = {name for name, one in tensors.items() if by_replicas and one.replicated}
        self.alone = [block for block in blocks if block.tensor in replicated]
        """Whole tensors that every holder, including this rank, updates."""
        updated = sorted(self.owned | {block.tensor for block in self.alone})
        self.states = {name: self._new_states(self.shapes[name], device) for name in updated}
        """States by name of the tensor, then by quantity."""
        self._empty = torch.empty(0, dtype=getattr(torch, self.whole.sent), device=device)
        sent = {name: one for name, one in tensors.items() if name not in replicated}
        self.rounds = [
            (
                [name for name in part if name in self.owned],
                _Transfer((r, t.owner, b) for t in part.values() for r, b in t.sources),
                _Transfer((t.owner, r, b) for t in part.values() for r, b in t.holders),
            )
            for part in _rounds(sent, len(everyones))
        ]
        """The tensors that this rank updates, with the gradients for their owners and the
        updates for their holders."""

    def _new_states(self, shape: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        return {
            quantity: torch.zeros(
                kind.shape(shape), dtype=getattr(torch, kind.dtype), device=device
            )
            for quantity, kind in self.whole.states(shape).items()
        }

    @torch.no_grad()
    def compute(self) -> None:
        """Replace the gradients by updates, in place. Collective."""
        held: dict[Block, Tensor] = {}
        step = 0
        for parameter, optimizer in self.owners.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient, state = parameter.grad, optimizer.state[parameter]
            moments = {name: local(state[name]) for name in self.whole.moments}
            self.rule.accumulate(local(gradient), moments)
            step = step or int(state["step"]) + 1
            held |= {one.block.stored: one.of(gradient) for one in self.held[parameter]}

        def update(name: str, whole: Tensor) -> Tensor:
            return self.rule.update(whole, self.states[name], step)

        for block in self.alone:
            held[block].copy_(update(block.tensor, held[block]))
        for owned, gradients, updates in self.rounds:
            wholes = {name: self._empty.new_empty(self.shapes[name]) for name in owned}
            gradients.run(held.__getitem__, partial(_rectangle, wholes), self._empty)
            for name, whole in wholes.items():
                wholes[name] = update(name, whole)
            updates.run(partial(_rectangle, wholes), held.__getitem__, self._empty)


def owner_shards(optimizers: Iterable[object]) -> Iterator[StateShard]:
    """The states that this rank keeps of the tensors that it owns."""
    ours = [one for one in optimizers if isinstance(one, OwnerOptimizer)]
    for unit in dict.fromkeys(unit for one in ours for unit in one.units.values()):
        for tensor, states in unit.states.items():
            mine = tensor in unit.owned
            for quantity, values in states.items():
                block = whole_block(tensor, values.shape)
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
    """Determine the tensors of the rule's parameters, and plan their updates. Collective.

    `state` is the engine's: its fp32 weights are parts of the parameters, or all of them.
    `apart`: each parameter has a separate step on all ranks, in the same order.
    """
    whole = whole_of(setup.optimizer)
    for parameter, optimizer in owners.items():
        adam.moments(optimizer, parameter, kept=whole.moments)
    held = _held_in(owners, state(), whole)
    parts = [{p: owners[p]} for p in owners] if apart else [owners]
    return [Unit(some, held, setup.optimizer, setup.ranks.device) for some in parts]


def _held_in(
    parameters: Iterable[Tensor], state: Iterable[StateShard], whole: WholeTensors
) -> dict[Tensor, list[_Piece]]:
    """The rectangles of the rule's tensors in this rank's memory of each parameter."""
    found: dict[Tensor, list[_Piece]] = {parameter: [] for parameter in parameters}
    starts = sorted(
        ((local(parameter).data_ptr(), parameter) for parameter in parameters),
        key=lambda one: one[0],
    )
    for shard in state:
        if not starts or not shard.blocks or not takes(whole, shard.blocks):
            continue
        address = shard.get("weight").data_ptr()
        start, parameter = starts[bisect(starts, address, key=lambda one: one[0]) - 1]
        first = (address - start) // torch.float32.itemsize
        if not 0 <= first < local(parameter).numel():
            continue  # does not train
        for block, offset in with_offsets(shard.blocks):
            found[parameter].append(_Piece(block, first + offset))
    return found


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the memory itself, without history."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
