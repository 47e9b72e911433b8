"""A rank's trained weights as rectangles of checkpoint tensors, and who sends which."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from toolkit.checkpoint.shards import StateShard, key_of, stored_values, with_offsets
from toolkit.engines.base import Engine
from toolkit.extras.outer.wire import Floats, axes_of, shape_of
from toolkit.models.families.tensors import Block
from toolkit.models.frozen import frozen_names
from toolkit.recipe.schema import Recipe

Values = dict[str, Floats]
"""Values of rectangles in their stored form, by `key_of`."""


@dataclass(frozen=True)
class _OfRank:
    """What one rank holds."""

    sends: dict[str, tuple[int, ...]]
    """Shapes of the rectangles that it writes to checkpoints, too."""
    others: list[str]
    """Those that are written by another rank."""
    shapes: dict[str, list[int]]
    """The least shapes of whole tensors that they are inside of."""


class Rectangles:
    """The rectangles of this rank. A rectangle that several ranks hold is sent to the holder by
    one of them, which also gets the new one and broadcasts it."""

    def __init__(self, engine: Engine, recipe: Recipe, group: dist.ProcessGroup) -> None:
        """Collective."""
        self._engine, self._group = engine, group
        self._adapted, self._freeze = recipe.adapter is not None, recipe.model.freeze
        held = {
            key_of("weight", block.stored): (block.stored, shard.saved_here)
            for shard in self._shards()
            for block in shard.blocks
        }
        sends = {key: shape_of(block) for key, (block, mine) in held.items() if mine}
        ends: dict[str, list[int]] = {}
        for block, _ in held.values():
            stop = [axis.stop for axis in axes_of(block)]
            ends[block.tensor] = _larger(ends.get(block.tensor, stop), stop)
        own = _OfRank(sends, [key for key in held if key not in sends], ends)
        ranks: list[_OfRank] = [own] * dist.get_world_size(group)
        dist.all_gather_object(ranks, own, group=group)
        wanted = {key for one in ranks for key in one.others}
        self._broadcasts = [
            (rank, key, shape)
            for rank, one in enumerate(ranks)
            for key, shape in one.sends.items()
            if key in wanted
        ]
        sent = {key for one in ranks for key in one.sends}
        alone = [key for key in own.others if key not in sent]
        self.sends = [held[key][0] for key in sends]
        """What this rank sends to the holder."""
        self.takes = [held[key][0] for key in (*sends, *alone)]
        """What it gets: also what no rank sends as this one has cut it."""
        self.shapes: dict[str, list[int]] = {}
        """Of all whole tensors."""
        for one in ranks:
            for tensor, stop in one.shapes.items():
                self.shapes[tensor] = _larger(self.shapes.get(tensor, stop), stop)

    def _shards(self) -> Iterator[StateShard]:
        """Those whose weights train."""
        for shard in self._engine.state():
            tensors = {block.tensor for block in shard.blocks}
            frozen = frozen_names(self._freeze, tensors) if self._freeze else ()
            trains = shard.trains if self._adapted else not tensors <= set(frozen)
            if tensors and trains and "weight" in shard.quantities:
                yield shard

    def read(self) -> Values:
        """The weights of `takes`."""
        wanted = {key_of("weight", block) for block in self.takes}
        found: Values = {}
        for shard in self._shards():
            flat = shard.get("weight")
            for block, offset in with_offsets(shard.blocks):
                if (key := key_of("weight", block.stored)) in wanted:
                    values = stored_values(block, offset, flat)
                    found[key] = np.array(values.cpu().numpy(), np.float32, order="C")
        return found

    def write(self, values: Values) -> None:
        """Give `takes`, and what other ranks broadcast, these values; collective."""
        values = {**values, **self._others(values)}
        for shard in self._shards():
            flat = shard.get("weight").clone()
            for block, offset in with_offsets(shard.blocks):
                new = torch.from_numpy(values[key_of("weight", block.stored)])
                stored_values(block, offset, flat).copy_(new)
                size = offset + new.numel()
            shard.put("weight", flat[:size])
        self._engine.follow_state()

    def _others(self, values: Values) -> Values:
        found, rank = {}, dist.get_rank(self._group)
        for source, key, shape in self._broadcasts:
            part = values[key] if source == rank else np.empty(shape, np.float32)
            tensor = torch.from_numpy(np.ascontiguousarray(part))
            dist.broadcast(tensor, source, group=self._group)
            found[key] = tensor.numpy()
        return found


def in_order(values: Values, blocks: list[Block]) -> list[Floats]:
    """The values of these rectangles."""
    return [values[key_of("weight", block)] for block in blocks]


def by_key(blocks: list[Block], values: list[Floats]) -> Values:
    """The inverse of `in_order`."""
    return {key_of("weight", block): one for block, one in zip(blocks, values, strict=True)}


def _larger(one: list[int], other: list[int]) -> list[int]:
    return [max(pair) for pair in zip(one, other, strict=True)]
