"""Optimizers whose updates need whole tensors, each computed by one rank, its owner
(`toolkit/engines/owners.py`): the work of the busiest owner of a pipeline stage."""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from toolkit.layout import Layout, stage_layers
from toolkit.models.families import mapped
from toolkit.models.frozen import matching
from toolkit.models.matrices import MIN_8BIT_SIZE, is_layer_matrix, scale_count
from toolkit.models.parameter_groups import is_embedding
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.operators import Device, matmul_s
from toolkit.plan.cost.traffic import PlacedLayout
from toolkit.recipe.schema import OptimizerName, OptimizerSection

if TYPE_CHECKING:
    from toolkit.plan.cost.workload import Workload


MOVED_BYTES = {"adafactor": 48, "adamw_8bit": 28}
"""Bytes that an owner moves per element. Adafactor's: the gradient squared (8) and averaged
over both axes (8), the factors' product (4) times the gradient (12), its norm (4), the division
(8), the copy of the result (4). 8-bit AdamW's: the update cleared (4), read and written (8),
gradient (4) and codes (4), the copy of the result (8)."""


class OwnedTensor(NamedTuple):
    """A checkpoint tensor that is updated as a whole."""

    shape: tuple[int, ...]
    layer: int
    """-1 for embeddings; for final norm and head, the number of layers."""
    expert: bool


@dataclass(frozen=True)
class OwnerUpdates:
    """The tensors that an optimizer updates as wholes."""

    optimizer: OptimizerName
    steps: int
    """Of the Newton-Schulz iteration."""
    tensors: tuple[tuple[OwnedTensor, int], ...]
    """With how many there are of each."""
    largest: int
    """Elements of the largest one."""

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
    if optimizer.name == "adamw":
        return None
    shapes = _shapes(config)
    frozen = matching(freeze, shapes)
    counts = Counter(
        tensor
        for name, tensor in shapes.items()
        if name not in frozen and _updated(optimizer.name, name, tensor)
    )
    largest = max((prod(tensor.shape) for tensor in counts), default=0)
    return OwnerUpdates(
        optimizer.name, optimizer.muon_settings.ns_steps, tuple(counts.items()), largest
    )


def _updated(optimizer: OptimizerName, name: str, tensor: OwnedTensor) -> bool:
    if optimizer == "muon":
        return is_layer_matrix(name, len(tensor.shape))
    return optimizer == "adafactor" or not is_embedding(name)


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
    if updates.optimizer != "muon" and by_replicas(layout):
        ranks = layout.ep
    chunks = stage_layers(place.workload.spec.layers, layout.pp, layout.vpp)
    return _owner_s(updates, chunks, layout.pp, stage, ranks, layout.ep, device)


def by_replicas(layout: Layout) -> bool:
    """Whether every rank that holds a tensor holds all of it. Then only Muon communicates."""
    return layout.zero_stage == 0 and layout.tp == 1


def owned_bytes(workload: "Workload", layout: Layout, stage: int) -> float:
    """Bytes of owners' states on one rank of a stage, distributed over the ranks. Adafactor: a
    row and a column of every matrix, a whole vector. 8-bit AdamW: codes and their scales, for
    small tensors two moments."""
    assert workload.updates is not None
    chunks = stage_layers(workload.spec.layers, layout.pp, layout.vpp)
    tensors = workload.updates.of_stage(chunks, layout.pp, stage)
    each = _coded_bytes if workload.updates.optimizer == "adamw_8bit" else _factored_bytes
    held = sum(count * each(tensor.shape) for tensor, count in tensors.items())
    return held if by_replicas(layout) else held / (layout.world // layout.pp)


def _factored_bytes(shape: tuple[int, ...]) -> int:
    return FP32_BYTES * sum(shape)


def _coded_bytes(shape: tuple[int, ...]) -> int:
    if prod(shape) < MIN_8BIT_SIZE:
        return 2 * FP32_BYTES * prod(shape)
    return 2 * (prod(shape) + FP32_BYTES * scale_count(shape))


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
    if moved := MOVED_BYTES.get(updates.optimizer):
        return moved * prod(shape) / device.memory
    return newton_schulz_s(shape, updates.steps, device)


def newton_schulz_s(shape: Sequence[int], steps: int, device: Device) -> float:
    """Seconds of the iteration's three products a step, `newton_schulz_flops` together."""
    m, n = sorted(shape)
    products: tuple[tuple[int, int, int], ...] = ((m, m, n), (m, m, m), (m, n, m))
    return steps * sum(matmul_s(*sizes, device, plain=True) for sizes in products)


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
