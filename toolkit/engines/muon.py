"""Muon: momentum, orthogonalised, as the update of every matrix inside a decoder layer.

With momentum M and gradient G of a matrix [m, n] of the Hugging Face checkpoint, a step does

    M ← μ M + (1 - μ) G,  U ← NS(μ M + (1 - μ) G),  W ← W - lr·λ W - lr·a(m, n) U

as `torch.optim.Muon` does (Keller Jordan, https://kellerjordan.github.io/posts/muon). All but
the Newton-Schulz iteration NS is element-wise and runs on the elements that a rank holds,
whatever the layout. NS needs the whole matrix, and runs on one rank, its owner: the other
holders send it their rectangles, and every holder gets back the same result. So the number
that a weight gets depends neither on how its matrix is spread nor on who holds copies.

NS begins by rounding to bf16 and ends in bf16: sending bf16 loses nothing.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# What `torch.optim.Muon` itself calls: it has no public name.
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from toolkit.checkpoint.shards import (
    StateShard,
    block_numel,
    block_shape,
    stored_values,
    with_offsets,
)
from toolkit.engines import optimizer as adam
from toolkit.engines.setup import EngineSetup
from toolkit.models.families.tensors import Block
from toolkit.models.matrices import EXCHANGED_AT_ONCE, is_layer_matrix
from toolkit.recipe.schema import OptimizerSection

COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)


def has_matrices(blocks: Iterable[Block]) -> bool:
    """Does Muon update the parameter that is made of `blocks`?"""
    return all(is_layer_matrix(b.tensor, len(block_shape(b))) for b in blocks)


def split_groups(
    groups: Iterable[dict[str, Any]], placed: Iterable[tuple[nn.Parameter, Iterable[Block]]]
) -> list[dict[str, Any]]:
    """The optimizer groups with those of Muon apart, whose `muon` is true; `placed` are the
    model's parameters with what they are made of."""
    matrices = {parameter for parameter, blocks in placed if has_matrices(blocks)}
    found = []
    for group in groups:
        for muon in (True, False):
            params = [p for p in group["params"] if (p in matrices) == muon]
            found += [{**group, "params": params, "muon": muon}] if params else []
    return found


@dataclass(frozen=True)
class _Matrix:
    """A checkpoint tensor and who holds which rectangles of it."""

    shape: tuple[int, int]
    holders: tuple[tuple[int, Block], ...]
    """Every copy of every rectangle, with its rank."""
    owner: int

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
    """What this rank does in one exchange: lists by rank, in the same order on both sides."""

    owned: Mapping[str, tuple[int, int]]
    """The matrices that this rank orthogonalises, with their shapes."""
    sent: list[list[Block]]
    """Its rectangles that go to each owner."""
    gathered: list[list[Block]]
    """The rectangles of what it owns that come from each rank."""
    returned: list[list[Block]]
    """The rectangles of what it owns that each rank holds."""
    received: list[list[Block]]
    """Its rectangles whose result comes from each owner."""


class Exchange:
    """Orthogonalises matrices that are spread over the ranks, or held by several."""

    def __init__(self, blocks: Sequence[Block], steps: int, device: torch.device) -> None:
        """Plan it for this rank's `blocks`, as stored; collective. `steps` are of the
        Newton-Schulz iteration."""
        self.rank, self.steps, self.device = dist.get_rank(), steps, device
        held: list[list[Block]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(held, list(blocks))
        matrices = _owned(held)
        self.shapes = {name: matrix.shape for name, matrix in matrices.items()}
        self.rounds = [self._round(part) for part in _rounds(matrices, len(held))]

    def _round(self, matrices: Mapping[str, _Matrix]) -> _Round:
        me, ranks = self.rank, range(dist.get_world_size())
        owned = {name: one for name, one in matrices.items() if one.owner == me}

        def others(copies: Iterable[tuple[int, Block]], rank: int) -> list[Block]:
            return [block for holder, block in copies if holder == rank]

        def of(owner: int) -> list[_Matrix]:
            return [one for one in matrices.values() if one.owner == owner]

        return _Round(
            {name: one.shape for name, one in owned.items()},
            [[b for one in of(rank) for b in others(one.sources, me)] for rank in ranks],
            [[b for one in owned.values() for b in others(one.sources, r)] for r in ranks],
            [[b for one in owned.values() for b in others(one.holders, r)] for r in ranks],
            [[b for one in of(rank) for b in others(one.holders, me)] for rank in ranks],
        )

    def run(self, held: Mapping[Block, Tensor]) -> None:
        """Replace this rank's rectangles [rows, columns] by those of the orthogonalised
        matrices; collective."""
        for part in self.rounds:
            wholes = {
                name: torch.empty(shape, dtype=torch.bfloat16, device=self.device)
                for name, shape in part.owned.items()
            }
            sent = [[held[block] for block in blocks] for blocks in part.sent]
            for block, values in self._all_to_all(sent, part.gathered):
                _rectangle(wholes, block).copy_(values)
            for name, whole in wholes.items():
                wholes[name] = _zeropower_via_newtonschulz(whole, COEFFICIENTS, self.steps, EPS)
            results = [[_rectangle(wholes, b) for b in blocks] for blocks in part.returned]
            for block, values in self._all_to_all(results, part.received):
                held[block].copy_(values)

    def _all_to_all(
        self, outgoing: list[list[Tensor]], incoming: list[list[Block]]
    ) -> list[tuple[Block, Tensor]]:
        """Send each rank its tensors; the blocks that come, with their values in bf16."""
        parts = [part.reshape(-1).bfloat16() for parts in outgoing for part in parts]
        empty = torch.empty(0, dtype=torch.bfloat16, device=self.device)
        sent = torch.cat([empty, *parts])
        sizes = [sum(map(block_numel, blocks)) for blocks in incoming]
        received = empty.new_empty(sum(sizes))
        sent_sizes = [sum(part.numel() for part in parts) for parts in outgoing]
        dist.all_to_all_single(received, sent, sizes, sent_sizes)
        arrived = with_offsets([block for blocks in incoming for block in blocks])
        return [(block, stored_values(block, offset, received)) for block, offset in arrived]


def _owned(held: Sequence[Sequence[Block]]) -> dict[str, _Matrix]:
    """The matrices of which `held` are the ranks' rectangles, the most expensive first.

    An owner is the holder with the least to compute so far: Newton-Schulz on [m, n] costs in
    proportion to m n min(m, n).
    """
    copies: dict[str, list[tuple[int, Block]]] = {}
    for rank, blocks in enumerate(held):
        for block in blocks:
            copies.setdefault(block.tensor, []).append((rank, block))
    shapes = {name: _shape([block for _, block in found]) for name, found in copies.items()}
    load = [0] * len(held)
    matrices = {}
    costs = {name: m * n * min(m, n) for name, (m, n) in shapes.items()}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owner = min({rank for rank, _ in copies[name]}, key=lambda rank: (load[rank], rank))
        load[owner] += costs[name]
        matrices[name] = _Matrix(shapes[name], tuple(copies[name]), owner)
    return matrices


def _shape(blocks: Sequence[Block]) -> tuple[int, int]:
    """The shape of the matrix that these rectangles, some of them several times, make up."""
    ends = [(b.rows[1], b.columns[1]) for b in blocks if b.columns is not None]
    rows, columns = (max(end) for end in zip(*ends, strict=True))
    whole = sum(map(block_numel, set(blocks))) == rows * columns
    assert whole, f"the ranks hold every element of {blocks[0].tensor} in one rectangle"
    return rows, columns


def _rounds(matrices: Mapping[str, _Matrix], world: int) -> list[dict[str, _Matrix]]:
    """The matrices in parts that no rank needs large buffers for."""
    parts: list[dict[str, _Matrix]] = []
    load = [EXCHANGED_AT_ONCE] * world
    for name, matrix in matrices.items():
        if max(load) >= EXCHANGED_AT_ONCE:
            parts.append({})
            load = [0] * world
        parts[-1][name] = matrix
        load[matrix.owner] += matrix.shape[0] * matrix.shape[1]
        for rank, block in matrix.holders:
            load[rank] += block_numel(block)
            load[matrix.owner] += block_numel(block)  # the copy of the result that it sends
    return parts


def _rectangle(wholes: Mapping[str, Tensor], block: Block) -> Tensor:
    assert block.columns is not None, "a matrix"
    rows, columns = block.steps
    return wholes[block.tensor][slice(*block.rows, rows), slice(*block.columns, columns)]


@dataclass(frozen=True)
class _Held:
    """A rectangle of a matrix inside an optimizer's parameter."""

    block: Block
    offset: int
    """Its first element in this rank's memory of the parameter."""

    def of(self, parameter: Tensor) -> Tensor:
        """Its elements of the parameter or of something of the same form, as stored."""
        return stored_values(self.block, self.offset, _local(parameter).view(-1))


class MuonAdamW(torch.optim.AdamW):
    """Muon for the groups whose `muon` is true, AdamW for all others.

    A group's parameters may be whole, sharded or flattened together. Until `bind` has found out
    what they are, those of Muon stay as they are.
    """

    def __init__(
        self, groups: list[dict[str, Any]], settings: OptimizerSection, **implementation: Any
    ) -> None:
        super().__init__(
            groups,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            **implementation,
        )
        self.muon = settings.muon_settings
        self.units: dict[Tensor, Unit] = {}
        """By parameter, what is orthogonalised together with it."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters of the groups; collective unless `Unit.run_by_engine`."""
        groups = self.param_groups
        matrices = [(p, g) for g in groups if g["muon"] for p in g["params"] if p in self.units]
        for unit in dict.fromkeys(self.units[parameter] for parameter, _ in matrices):
            if not unit.run_by_engine:
                unit.orthogonalize()
        for parameter, group in matrices:
            self._update(parameter, group)
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups

    def add_momentum(self, parameter: Tensor) -> Tensor:
        """Turn the gradient into what is orthogonalised, in place, and return it."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient, average = map(_local, (parameter.grad, self.state[parameter]["exp_avg"]))
        average.lerp_(gradient, 1 - self.muon.momentum)
        if self.muon.nesterov:
            gradient.lerp_(average, self.muon.momentum)
        else:
            gradient.copy_(average)
        return parameter.grad

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Decay the weights, and subtract what the gradient has become."""
        rate, unit = group["lr"], self.units[parameter]
        assert parameter.grad is not None, "orthogonalised"
        _local(parameter).mul_(1 - rate * group["weight_decay"])
        for held in unit.held[parameter]:
            shape = torch.Size(unit.exchange.shapes[held.block.tensor])
            adjusted = _adjust_lr(rate, self.muon.adjust_lr, shape)
            held.of(parameter).add_(held.of(parameter.grad), alpha=-adjusted)
        self.state[parameter]["step"] += 1


class Unit:
    """Parameters whose matrices are orthogonalised in one exchange."""

    run_by_engine = False
    """The engine calls `orthogonalize`, before all optimizers' steps; otherwise a step does."""

    def __init__(
        self,
        owners: Mapping[Tensor, MuonAdamW],
        held: Mapping[Tensor, list[_Held]],
        exchange: Exchange,
    ) -> None:
        self.owners = owners
        """The parameters, with the optimizers that update them."""
        self.held = held
        self.exchange = exchange
        for parameter, optimizer in owners.items():
            optimizer.units[parameter] = self

    @torch.no_grad()
    def orthogonalize(self) -> None:
        """Turn the gradients into orthogonalised updates, in place; collective."""
        rectangles = {}
        for parameter, optimizer in self.owners.items():
            gradient = optimizer.add_momentum(parameter)
            for one in self.held[parameter]:
                rectangles[one.block.stored] = one.of(gradient)
        self.exchange.run(rectangles)


def matrices_of(optimizer: MuonAdamW) -> dict[Tensor, MuonAdamW]:
    """The parameters that an optimizer's groups have for Muon."""
    groups = [group for group in optimizer.param_groups if group["muon"]]
    return {parameter: optimizer for group in groups for parameter in group["params"]}


def bind(
    owners: Mapping[Tensor, MuonAdamW],
    state: Callable[[], Iterator[StateShard]],
    setup: EngineSetup,
    *,
    apart: bool = False,
) -> list[Unit]:
    """Find out what the parameters with Muon hold, and plan how they are orthogonalised;
    collective.

    `state` is the engine's: its fp32 weights are parts of the parameters, or all of them.
    `apart`: each parameter has a step of its own on all ranks, in the same order.
    """
    for parameter in owners:
        adam.moments(owners[parameter], parameter, second=False)
    held = _held_in(owners, state())
    steps, device = setup.optimizer.muon_settings.ns_steps, setup.ranks.device
    units = []
    for some in [{p: owners[p]} for p in owners] if apart else [owners]:
        blocks = [one.block.stored for parameter in some for one in held[parameter]]
        units.append(Unit(some, held, Exchange(blocks, steps, device)))
    return units


def _held_in(
    parameters: Iterable[Tensor], state: Iterable[StateShard]
) -> dict[Tensor, list[_Held]]:
    """The rectangles of matrices in this rank's memory of each parameter."""
    found: dict[Tensor, list[_Held]] = {parameter: [] for parameter in parameters}
    starts = sorted(
        ((_local(parameter).data_ptr(), parameter) for parameter in parameters),
        key=lambda one: one[0],
    )
    for shard in state:
        if not shard.trains or not shard.blocks or not has_matrices(shard.blocks):
            continue
        address = shard.get("weight").data_ptr()
        start, parameter = starts[bisect(starts, address, key=lambda one: one[0]) - 1]
        first = (address - start) // torch.float32.itemsize
        for block, offset in with_offsets(shard.blocks):
            found[parameter].append(_Held(block, first + offset))
    return found


def _local(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor, without history."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
