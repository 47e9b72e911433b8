"""The flat buffers of megatron-core's distributed optimizer, in the form `dp_reshardable`.

Each group of data-parallel ranks has one for every chunk of the model, in buckets: its
parameters one after the other, the last registered one first, each from a multiple of 64
elements on. The buffers do not name them. What is assumed of their order is proven here: every
parameter's fp32 weights, rounded, must be those that the checkpoint holds under its name.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from toolkit.errors import CheckpointError
from toolkit.extras.convert.checkpoint_keys import found_place
from toolkit.extras.convert.source import whole_blocks
from toolkit.extras.convert.torch_dist import Reader
from toolkit.extras.imports.base import LazyShard
from toolkit.models.families import MegatronModel
from toolkit.models.families.base import Instance
from toolkit.models.families.tensors import Block, blocks, overlaps
from toolkit.optimizers.base import MOMENTS

_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.param"
)
ALIGNMENT = 64
"""Elements; where a parameter begins in its bucket."""
_BEFORE = ("embedding.word_embeddings", "embedding.position_embeddings")
_AFTER = ("decoder.final_layernorm", "output_layer")
_LAYER = (
    "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
"""A layer's modules in the order in which megatron-core registers them."""
_ORDERS = (
    ("input_layernorm", *_LAYER),
    (_LAYER[0], "input_layernorm", *_LAYER[1:]),
)
"""With norms of their own, and with Transformer Engine's, which are part of the next layer."""
_FIX = (
    "load it in Megatron-LM and save it with --dist-ckpt-optim-fully-reshardable, which stores "
    "the optimizer by the parameters' names"
)


@dataclass(frozen=True)
class Place:
    """Where a tensor-parallel rank's part of a parameter is in a buffer."""

    instance: Instance
    rank: int
    bucket: str
    """The key of its bucket without the quantity."""
    start: int
    numel: int
    """With the padding of the vocabulary."""


class Buffers:
    """The buffers of one checkpoint. Raises CheckpointError for what cannot be proven."""

    def __init__(self, reader: Reader, folder: Path, model: MegatronModel) -> None:
        self.reader, self.folder, self.model = reader, folder, model
        found = [match for key in reader.tensors if (match := _BUCKET.fullmatch(key))]
        self.buckets = {_numbers(match): match[0].removesuffix(".param") for match in found}
        self.groups = 1 + max((group for group, _, _ in self.buckets), default=-1)
        self.chunks = 1 + max((chunk for _, chunk, _ in self.buckets), default=0)
        self.weights = {
            instance: place
            for instance in model.instances()
            if (place := found_place(model, instance, reader.tensors)) is not None
        }
        if self.groups:
            self.tensor = self._degree()
            if self.groups % self.tensor or len(self.buckets) != len(found):
                raise self._unknown("several buffers of a rank")

    def shards(self) -> Iterator[LazyShard]:
        """Every parameter, once."""
        for order in _ORDERS:
            places = [*self._places(order)]
            if all(self._is_there(place) for place in places):
                yield from self._shards(places)
                return
        raise self._unknown("an order of parameters that is not known")

    def _unknown(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} holds the flat buffers of the distributed optimizer, with {what}",
            fix=_FIX,
        )

    def _degree(self) -> int:
        """The degree of tensor parallelism: into how many parts the vocabulary is split."""
        key = next(place.key for i, place in self.weights.items() if i.tensor.padded)
        rows = self.reader.tensors[key].size[0]
        return rows // self.reader.stored_sizes(key)[0][0]

    def _places(self, order: Sequence[str]) -> Iterator[Place]:
        """Where every part of every parameter would be, if layers are registered in `order`."""
        stages = self.groups // self.tensor
        for group in range(self.groups):
            stage, rank = divmod(group, self.tensor)
            for chunk in range(self.chunks):
                position = chunk * stages + stage
                held = self._registered(position, stages * self.chunks, order)
                yield from self._in_buckets(held[::-1], rank, group, chunk)

    def _registered(self, position: int, chunks: int, order: Sequence[str]) -> list[Instance]:
        """The parameters of one of the model's equal parts, in the order of registration."""
        layers = self.model.transformer["num_layers"]
        first, last = (layers * n // chunks for n in (position, position + 1))
        ranks: dict[Instance, tuple[int, int, str]] = {}
        for instance in self.model.instances():
            name, layer = instance.tensor.name, instance.layer
            if layer is not None:
                inner = name.partition("{layer}.")[2]
                module, _, kind = inner.rpartition(".")
                if module not in order:
                    raise self._unknown(f"{name}, whose place is not known")
                # Where registered, a weight precedes its bias.
                key = (1 + layer, order.index(module), "b" if kind == "bias" else "a")
                here = first <= layer < last
            else:
                module, _, kind = name.rpartition(".")
                before = module in _BEFORE
                if module not in (*_BEFORE, *_AFTER):
                    raise self._unknown(f"{name}, whose place is not known")
                index = _BEFORE.index(module) if before else _AFTER.index(module)
                key = (0 if before else 1 + layers, index, "b" if kind == "bias" else "a")
                here = position == (0 if before else chunks - 1)
                # A tied head on another rank than the embedding is a parameter of its own.
                tied = module == _BEFORE[0] and not self._has_head and chunks > 1
                if tied and position == chunks - 1:
                    key, here = (1 + layers, len(_AFTER), "a"), True
            if here:
                ranks[instance] = key
        return sorted(ranks, key=lambda instance: ranks[instance])

    @property
    def _has_head(self) -> bool:
        return any(i.tensor.name.startswith(_AFTER[1]) for i in self.weights)

    def _in_buckets(
        self, held: Sequence[Instance], rank: int, group: int, chunk: int
    ) -> Iterator[Place]:
        """The parameters of a buffer, one after the other."""
        bucket, start = 0, 0
        for instance in held:
            start += -start % ALIGNMENT
            key = self.buckets.get((group, chunk, bucket), "")
            if key and start >= self._numel(key):
                bucket, start = bucket + 1, 0
                key = self.buckets.get((group, chunk, bucket), "")
            numel = self._part(instance, rank).numel()
            if not key or start + numel > self._numel(key):
                numel = 0  # it is not there, as `_is_there` finds
            yield Place(instance, rank, key, start, numel)
            start += numel

    def _numel(self, bucket: str) -> int:
        return self.reader.tensors[f"{bucket}.param"].size[0]

    def _part(self, instance: Instance, rank: int) -> Tensor:
        """A rank's part of the weight that is stored under its name."""
        place, tensor = self.weights[instance], instance.tensor
        leading = len(place.index)
        size = self.reader.tensors[place.key].size[leading:]
        offset = (*place.index, *(0,) * len(size))
        whole = self.reader.read(place.key, offset, (*(1,) * leading, *size)).view(size)
        if tensor.split == "none":
            return whole
        if tensor.split == "columns":
            return whole.chunk(self.tensor, dim=1)[rank]
        stacks = whole.chunk(len(tensor.stacks))
        return torch.cat([stack.chunk(self.tensor)[rank] for stack in stacks])

    def _is_there(self, place: Place) -> bool:
        """Whether the fp32 weights at this place are those that are stored by name."""
        expected = self._part(place.instance, place.rank)
        if place.numel != expected.numel():
            return False
        master = self._read(place, "param")
        if master.dtype != torch.float32:
            raise self._unknown(f"weights in {master.dtype}")
        return torch.equal(master.to(expected.dtype), expected.reshape(-1))

    def _read(self, place: Place, quantity: str) -> Tensor:
        key = f"{place.bucket}.{quantity}"
        return self.reader.read(key, (place.start,), (place.numel,))

    def _shards(self, places: Sequence[Place]) -> Iterator[LazyShard]:
        seen = set()
        for place in places:
            instance = place.instance
            rank = 0 if instance.tensor.split == "none" else place.rank
            if (instance, rank) in seen:
                continue  # another rank's copy
            seen.add((instance, rank))
            held = self._blocks(instance, rank)
            if not held:
                continue  # padding alone
            elements = sum(len(one.row_numbers) * len(one.column_numbers) for one in held)
            reads = {
                quantity: partial(self._first, place, stored, elements)
                for quantity, stored in (("weight", "param"), *((one, one) for one in MOMENTS))
            }
            yield LazyShard(held, reads)

    def _blocks(self, instance: Instance, rank: int) -> list[Block]:
        """A rank's rectangles. Of the vocabulary, it has an equal part of the padded rows."""
        tensor = instance.tensor
        if not tensor.padded:
            return blocks(
                tensor, rank, self.tensor, layer=instance.layer, expert=instance.expert
            )
        rows = self.reader.tensors[self.weights[instance].key].size[0] // self.tensor
        inside = overlaps(
            whole_blocks(instance),
            lambda one: len(one.row_numbers),
            rank * rows,
            (rank + 1) * rows,
        )
        return [block.between(first, last) for block, first, last in inside]

    def _first(self, place: Place, quantity: str, elements: int) -> Tensor:
        """Without the padding of the vocabulary."""
        return self._read(place, quantity)[:elements]


def _numbers(match: re.Match[str]) -> tuple[int, int, int]:
    group, chunk, bucket = map(int, match.groups())
    return group, chunk, bucket
