"""The tensors that an optimizer updates as wholes, each on one rank, its owner
(`toolkit/engines/owners.py`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

from toolkit.layout import Layout, stage_layers
from toolkit.models.families import mapped
from toolkit.models.frozen import matching
from toolkit.optimizers.base import OPTIMIZERS, WholeTensors
from toolkit.recipe.schema import OptimizerSection


class OwnedTensor(NamedTuple):
    """A checkpoint tensor that is updated as a whole."""

    shape: tuple[int, ...]
    layer: int
    """-1 for embeddings; for final norm and head, the number of layers."""
    expert: bool


@dataclass(frozen=True)
class OwnerUpdates:
    """The tensors that an optimizer updates as wholes."""

    optimizer: str
    """`optimizer.name`."""
    tensors: tuple[tuple[OwnedTensor, int], ...]
    """With how many there are of each."""
    largest: int
    """Elements of the largest one."""

    @property
    def whole(self) -> WholeTensors:
        """How the optimizer updates them."""
        whole = OPTIMIZERS[self.optimizer].whole
        assert whole is not None, "`owner_updates`"
        return whole

    def of_stage(
        self, layers: int, division: tuple[int, int, tuple[int, ...]], stage: int
    ) -> list[tuple[OwnedTensor, int]]:
        """The tensors of a pipeline stage, over all of its ranks, with their counts."""
        chunks, pp = stage_layers(layers, *division), division[0]
        bounds = list(accumulate(chunks, initial=0))
        held = {i for one in range(stage, len(chunks), pp) for i in range(*bounds[one:][:2])}
        held |= {-1} if stage == 0 else set()
        held |= {bounds[-1]} if stage == pp - 1 else set()
        return [(tensor, count) for tensor, count in self.tensors if tensor.layer in held]

    def state_bytes(self, layers: int, layout: Layout, stage: int) -> float:
        """Bytes of owners' states on one rank of a stage, distributed over the ranks."""
        tensors, each = self.of_stage(layers, layout.division, stage), self.whole.owner_bytes
        held = sum(count * each(tensor.shape) for tensor, count in tensors)
        return held if replicated(layout) else held / (layout.world // layout.pp)


def replicated(layout: Layout) -> bool:
    """Whether every rank that holds a tensor holds all of it."""
    return layout.zero_stage == 0 and layout.tp == 1


def owner_updates(
    config: Mapping[str, object], freeze: Sequence[str], optimizer: OptimizerSection
) -> OwnerUpdates | None:
    """The tensors of a model with this config; None with AdamW."""
    whole = optimizer.kind.whole
    if whole is None:
        return None
    shapes = _shapes(config)
    frozen = matching(freeze, shapes)
    counts = Counter(
        tensor
        for name, tensor in shapes.items()
        if name not in frozen and whole.takes(name, len(tensor.shape))
    )
    largest = max((prod(tensor.shape) for tensor in counts), default=0)
    return OwnerUpdates(optimizer.name, tuple(counts.items()), largest)


def _shapes(config: Mapping[str, object]) -> dict[str, OwnedTensor]:
    """Every checkpoint tensor; a transposed one as megatron-core holds it."""
    found: dict[str, OwnedTensor] = {}
    model = mapped(config)
    for instance in model.instances():
        tensor, layer = instance.tensor, instance.layer
        if layer is None:
            layer = -1 if "embedding" in tensor.name else model.transformer["num_layers"]
        numbers = {"layer": instance.layer, "expert": instance.expert}
        columns = () if tensor.columns is None else (tensor.columns,)
        for part in (part for stack in tensor.stacks for part in stack):
            name = part.tensor.format(**numbers)
            rows = max(part.stop, *(found[name].shape[:1] if name in found else ()), 0)
            found[name] = OwnedTensor((rows, *columns), layer, instance.expert is not None)
    return found
