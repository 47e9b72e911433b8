"""A replica's trained weights as whole tensors of the checkpoint, which rank 0 has."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from toolkit.checkpoint.shards import (
    StateShard,
    joint_shape,
    key_of,
    stored_values,
    with_offsets,
)
from toolkit.engines.base import Engine
from toolkit.extras.outer.optimizer import Shapes, Weights
from toolkit.models.families.tensors import Block
from toolkit.models.frozen import matching
from toolkit.recipe.schema import Recipe


class WholeWeights:
    """Collects the weights of all ranks, and hands new ones out. Every method is collective.

    One tensor after the other: in addition to its own part, a rank holds one whole tensor.
    """

    def __init__(self, engine: Engine, recipe: Recipe, group: dist.ProcessGroup) -> None:
        self._engine, self._group, self._rank = engine, group, dist.get_rank(group)
        self._adapted, self._freeze = recipe.adapter is not None, recipe.model.freeze
        self._held: dict[str, list[Block]] = {}
        """Rectangles of this rank by their tensor, as the checkpoint stores them."""
        for shard in self._shards():
            for block in shard.blocks:
                self._held.setdefault(block.tensor, []).append(block.stored)
        own = {name: joint_shape(blocks) for name, blocks in self._held.items()}
        every: list[Shapes] = [own] * dist.get_world_size(group)
        dist.all_gather_object(every, own, group=group)
        self.shapes: Shapes = {}
        """Of all whole tensors."""
        for name in sorted({name for shapes in every for name in shapes}):
            found = [shapes[name] for shapes in every if name in shapes]
            self.shapes[name] = tuple(map(max, zip(*found, strict=True)))

    def _shards(self) -> Iterator[StateShard]:
        """Those whose weights train."""
        for shard in self._engine.state():
            tensors = {block.tensor for block in shard.blocks}
            frozen = matching(self._freeze, tensors)
            trains = shard.trains if self._adapted else not tensors <= frozen
            if tensors and trains and "weight" in shard.quantities:
                yield shard

    def gather(self) -> Weights:
        """Whole tensors on rank 0, none on the others.

        As sums over ranks of what each writes to checkpoints, and zeros elsewhere: exact, since
        every element is written by one.
        """
        saved: dict[str, list[tuple[Block, torch.Tensor]]] = {}
        for shard in self._shards():
            flat = shard.get("weight")
            for block, offset in with_offsets(shard.blocks if shard.saved_here else ()):
                values = stored_values(block, offset, flat).cpu()
                saved.setdefault(block.tensor, []).append((block.stored, values))
        found: Weights = {}
        for name, shape in self.shapes.items():
            whole = torch.zeros(shape)
            for block, values in saved.pop(name, ()):
                whole[_inside(block)] = values
            dist.reduce(whole, 0, group=self._group)
            if self._rank == 0:
                found[name] = whole.numpy()
        return found

    def scatter(self, weights: Weights) -> None:
        """Give every rank its part of rank 0's tensors."""
        parts: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            rank_zero = self._rank == 0
            whole = torch.from_numpy(weights[name]) if rank_zero else torch.empty(shape)
            dist.broadcast(whole, 0, group=self._group)
            for block in self._held.get(name, ()):
                parts[key_of("weight", block)] = whole[_inside(block)].clone()
        for shard in self._shards():
            flat, size = shard.get("weight").clone(), 0
            for block, offset in with_offsets(shard.blocks):
                part = parts[key_of("weight", block.stored)]
                stored_values(block, offset, flat).copy_(part)
                size = offset + part.numel()
            shard.put("weight", flat[:size])
        self._engine.follow_state()


def _inside(block: Block) -> tuple[slice, ...]:
    """The place of a rectangle in its whole tensor."""
    axes = [block.row_numbers, *([] if block.columns is None else [block.column_numbers])]
    return tuple(slice(axis.start, axis.stop, axis.step) for axis in axes)
