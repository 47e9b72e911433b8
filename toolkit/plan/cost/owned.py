"""The tensors that an optimizer updates as wholes, each on one rank, its owner
(`toolkit/engines/owners.py`). They are spread evenly over layers and over the ranks that hold
them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from toolkit.layout import Layout
from toolkit.models.families import mapped
from toolkit.models.frozen import matching
from toolkit.optimizers.base import OPTIMIZERS, Shape, WholeTensors
from toolkit.recipe.schema import OptimizerSection


@dataclass(frozen=True)
class OwnerUpdates:
    """The tensors that an optimizer updates as wholes."""

    optimizer: str
    """`optimizer.name`."""
    tensors: tuple[tuple[Shape, int], ...]
    """Their shapes, with how many there are of each."""
    largest: int
    """Elements of the largest one."""

    @property
    def whole(self) -> WholeTensors:
        """How the optimizer updates them."""
        whole = OPTIMIZERS[self.optimizer].whole
        assert whole is not None, "`owner_updates`"
        return whole

    def state_bytes(self, layout: Layout) -> float:
        """Bytes of owners' states on a rank that holds all layers."""
        each = self.whole.owner_bytes
        held = sum(count * each(shape) for shape, count in self.tensors)
        return held if replicated(layout) else held / (layout.world // layout.pp)


def replicated(layout: Layout) -> bool:
    """Whether every rank that holds a tensor holds all of it."""
    return layout.zero_stage == 0 and layout.tp == 1


def owner_updates(
    config: Mapping[str, object], freeze: Sequence[str], optimizer: OptimizerSection
) -> OwnerUpdates | None:
    """The tensors of a model with this config. None with AdamW."""
    whole = optimizer.kind.whole
    if whole is None:
        return None
    shapes = _shapes(config)
    frozen = matching(freeze, shapes)
    counts = Counter(
        shape
        for name, shape in shapes.items()
        if name not in frozen and whole.takes(name, len(shape))
    )
    largest = max(map(prod, counts), default=0)
    return OwnerUpdates(optimizer.name, tuple(counts.items()), largest)


def _shapes(config: Mapping[str, object]) -> dict[str, Shape]:
    """Every checkpoint tensor. A transposed one as megatron-core holds it."""
    found: dict[str, Shape] = {}
    for instance in mapped(config).instances():
        tensor = instance.tensor
        numbers = {"layer": instance.layer, "expert": instance.expert}
        columns = () if tensor.columns is None else (tensor.columns,)
        for part in (part for stack in tensor.stacks for part in stack):
            name = part.tensor.format(**numbers)
            found[name] = (max(part.stop, *found.get(name, ())[:1], 0), *columns)
    return found
