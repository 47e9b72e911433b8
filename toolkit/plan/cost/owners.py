"""Optimizers whose updates need whole tensors, each computed by one rank, its owner
(`toolkit/engines/owners.py`): the work of the busiest owner of a pipeline stage."""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.layout import Layout, stage_layers
from toolkit.models.families import mapped
from toolkit.models.frozen import matching
from toolkit.optimizers.base import OPTIMIZERS, WholeTensors
from toolkit.plan.cost.operators import Device, matmul_s
from toolkit.plan.cost.traffic import PlacedLayout
from toolkit.recipe.schema import OptimizerSection

if TYPE_CHECKING:
    from toolkit.plan.cost.workload import Workload


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
    own: Any
    """Its section."""
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

    def of_stage(self, chunks: Sequence[int], pp: int, stage: int) -> Counter[OwnedTensor]:
        """The tensors of a pipeline stage, over all of its ranks; `chunks` count layers."""
        bounds = list(accumulate(chunks, initial=0))
        held = {i for one in range(stage, len(chunks), pp) for i in range(*bounds[one:][:2])}
        held |= {-1} if stage == 0 else set()
        held |= {bounds[-1]} if stage == pp - 1 else set()
        return Counter({tensor: n for tensor, n in self.tensors if tensor.layer in held})


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
    return OwnerUpdates(optimizer.name, optimizer.own, tuple(counts.items()), largest)


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


def owner_s(place: PlacedLayout, stage: int, device: Device) -> float:
    """Seconds that the busiest rank of a pipeline stage needs for the tensors that it owns."""
    updates, layout = place.workload.updates, place.layout
    if updates is None:
        return 0.0
    ranks = layout.world // layout.pp
    if updates.whole.by_replicas and replicated(layout):
        ranks = layout.ep
    chunks = stage_layers(place.workload.spec.layers, layout.pp, layout.vpp)
    return _owner_s(updates, chunks, layout.pp, stage, ranks, layout.ep, device)


def replicated(layout: Layout) -> bool:
    """Whether every rank that holds a tensor holds all of it."""
    return layout.zero_stage == 0 and layout.tp == 1


def owned_bytes(workload: "Workload", layout: Layout, stage: int) -> float:
    """Bytes of owners' states on one rank of a stage, distributed over the ranks."""
    assert workload.updates is not None
    chunks = stage_layers(workload.spec.layers, layout.pp, layout.vpp)
    tensors = workload.updates.of_stage(chunks, layout.pp, stage)
    each = workload.updates.whole.owner_bytes
    held = sum(count * each(tensor.shape) for tensor, count in tensors.items())
    return held if replicated(layout) else held / (layout.world // layout.pp)


@lru_cache(maxsize=4096)
def _owner_s(
    updates: OwnerUpdates, chunks: Sequence[int], pp: int, stage: int, ranks: int, ep: int,
    device: Device,
) -> float:  # fmt: skip
    """Every rank that holds a part of a tensor may own it: the stage's `ranks`, or those that
    hold this expert. With flat partitions (ZeRO 1 and 2, the distributed optimizer) fewer ranks
    hold a part of a tensor: they count as if every rank did.
    """
    tensors = updates.of_stage(chunks, pp, stage)

    def seconds(experts: Collection[bool], groups: int) -> float:
        costs: Counter[float] = Counter()
        for tensor, count in tensors.items():
            if tensor.expert in experts:
                costs[_update_s(tensor.shape, updates, device)] += count
        each = {cost: count // groups for cost, count in costs.items()}
        return busiest(each, ranks // groups)

    if ep == 1:
        return seconds((True, False), 1)
    return seconds((False,), 1) + seconds((True,), ep)


def _update_s(shape: tuple[int, ...], updates: OwnerUpdates, device: Device) -> float:
    whole = updates.whole
    times, products = whole.products(shape, updates.own)
    return whole.moved_bytes * prod(shape) / device.memory + times * sum(
        matmul_s(*sizes, device, plain=True) for sizes in products
    )


def busiest(costs: Mapping[float, int], ranks: int) -> float:
    """The largest load if tensors are assigned in descending order of cost, each to the rank
    with the least load; `costs` with the number of tensors of each."""
    loads, everywhere = [0.0] * ranks, 0.0
    for cost, count in sorted(costs.items(), reverse=True):
        left = count
        if max(loads) - loads[0] <= cost:  # then equal ones are assigned round-robin
            everywhere += cost * (count // ranks)
            left = count % ranks
        for _ in range(left):
            heapq.heapreplace(loads, loads[0] + cost)
    return everywhere + max(loads)
