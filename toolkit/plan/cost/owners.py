"""Optimizers whose updates need whole tensors, each computed by one rank, its owner
(`toolkit/engines/owners.py`): what the busiest owner of a pipeline stage computes."""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from toolkit.layout import stage_layers
from toolkit.models.families import mapped
from toolkit.models.frozen import matching
from toolkit.models.matrices import is_layer_matrix
from toolkit.plan.cost.operators import Device, matmul_s
from toolkit.plan.cost.traffic import PlacedLayout
from toolkit.recipe.schema import OptimizerName


class OwnedTensor(NamedTuple):
    """A checkpoint tensor that is updated as a whole."""

    shape: tuple[int, ...]
    layer: int | None
    """None outside the layers."""
    expert: bool


@dataclass(frozen=True)
class OwnerUpdates:
    """The tensors that an optimizer updates as wholes."""

    optimizer: OptimizerName
    steps: int
    """Of the Newton-Schulz iteration."""
    tensors: tuple[tuple[OwnedTensor, int], ...]
    """With how many there are of each."""


def owner_updates(
    config: Mapping[str, object], freeze: Sequence[str], optimizer: OptimizerName, steps: int
) -> OwnerUpdates | None:
    """Those of a model of this config; None with AdamW."""
    if optimizer == "adamw":
        return None
    shapes = _shapes(config)
    frozen = matching(freeze, shapes)
    counts = Counter(
        tensor
        for name, tensor in shapes.items()
        if name not in frozen and is_layer_matrix(name, len(tensor.shape))
    )
    return OwnerUpdates(optimizer, steps, tuple(counts.items()))


def _shapes(config: Mapping[str, object]) -> dict[str, OwnedTensor]:
    """Every checkpoint tensor; a transposed one as megatron-core holds it."""
    found: dict[str, OwnedTensor] = {}
    for instance in mapped(config).instances():
        tensor, numbers = instance.tensor, {"layer": instance.layer, "expert": instance.expert}
        columns = () if tensor.columns is None else (tensor.columns,)
        for part in (part for stack in tensor.stacks for part in stack):
            name = part.tensor.format(**numbers)
            rows = max(part.stop, *(found[name].shape[:1] if name in found else ()), 0)
            found[name] = OwnedTensor(
                (rows, *columns), instance.layer, instance.expert is not None
            )
    return found


def owner_s(place: PlacedLayout, stage: int, device: Device) -> float:
    """Seconds that the busiest rank of a pipeline stage needs for the tensors that it owns."""
    updates, layout = place.workload.updates, place.layout
    if updates is None:
        return 0.0
    chunks = tuple(stage_layers(place.workload.spec.layers, layout.pp, layout.vpp))
    ranks = layout.world // layout.pp
    return _owner_s(updates, chunks, layout.pp, stage, ranks, layout.ep, device)


@lru_cache(maxsize=4096)
def _owner_s(
    updates: OwnerUpdates, chunks: Sequence[int], pp: int, stage: int, ranks: int, ep: int,
    device: Device,
) -> float:  # fmt: skip
    """Every rank that holds a part of a tensor may own it: the stage's `ranks`, or those of them
    that have this expert. Flat partitions (ZeRO 1 and 2, the distributed optimizer) cut
    the model into runs, whose ranks hold fewer: they count as if every rank held a part.
    """
    bounds = list(accumulate(chunks, initial=0))
    held = {i for chunk in range(stage, len(chunks), pp) for i in range(*bounds[chunk:][:2])}

    def seconds(experts: Collection[bool], groups: int) -> float:
        costs: Counter[float] = Counter()
        for tensor, count in updates.tensors:
            if tensor.layer in held and tensor.expert in experts:
                costs[newton_schulz_s(tensor.shape, updates.steps, device)] += count
        each = {cost: count // groups for cost, count in costs.items()}
        return busiest(each, ranks // groups)

    if ep == 1:
        return seconds((True, False), 1)
    return seconds((False,), 1) + seconds((True,), ep)


def newton_schulz_s(shape: Sequence[int], steps: int, device: Device) -> float:
    """Seconds of the iteration's three products a step, `newton_schulz_flops` together."""
    m, n = sorted(shape)
    products: tuple[tuple[int, int, int], ...] = ((m, m, n), (m, m, m), (m, n, m))
    return steps * sum(matmul_s(*sizes, device, plain=True) for sizes in products)


def busiest(costs: Mapping[float, int], ranks: int) -> float:
    """The largest load where the most expensive tensors come first and each goes to the rank
    with the least; `costs` with how many tensors have each."""
    loads, everywhere = [0.0] * ranks, 0.0
    for cost, count in sorted(costs.items(), reverse=True):
        left = count
        if max(loads) - loads[0] <= cost:  # then equal ones go round
            everywhere += cost * (count // ranks)
            left = count % ranks
        for _ in range(left):
            heapq.heapreplace(loads, loads[0] + cost)
    return everywhere + max(loads)
