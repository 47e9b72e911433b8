"""Optimizers whose updates need whole tensors, each computed by one rank, its owner
(`toolkit/engines/owners.py`): an owner's even share of the work of a pipeline stage."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from toolkit.layout import Layout, stage_layers
from toolkit.plan.cost.operators import Device, matmul_s
from toolkit.plan.cost.owned import OwnerUpdates
from toolkit.plan.cost.traffic import PlacedLayout
from toolkit.plan.cost.workload import Workload


def owner_s(place: PlacedLayout, stage: int, device: Device) -> float:
    """Seconds that a rank of a pipeline stage needs for the tensors that it owns, if they are
    spread evenly over the ranks that hold them."""
    updates, layout = place.workload.updates, place.layout
    if updates is None:
        return 0.0
    chunks = stage_layers(place.workload.spec.layers, *layout.division)
    dense_s, experts_s = _stage_s(updates, chunks, layout.pp, stage, device)
    if updates.whole.by_replicas and replicated(layout):
        return dense_s + experts_s / layout.ep
    return (dense_s + experts_s) * layout.pp / layout.world


def replicated(layout: Layout) -> bool:
    """Whether every rank that holds a tensor holds all of it."""
    return layout.zero_stage == 0 and layout.tp == 1


def owned_bytes(workload: Workload, layout: Layout, stage: int) -> float:
    """Bytes of owners' states on one rank of a stage, distributed over the ranks."""
    assert workload.updates is not None
    chunks = stage_layers(workload.spec.layers, *layout.division)
    tensors = workload.updates.of_stage(chunks, layout.pp, stage)
    each = workload.updates.whole.owner_bytes
    held = sum(count * each(tensor.shape) for tensor, count in tensors.items())
    return held if replicated(layout) else held / (layout.world // layout.pp)


@lru_cache(maxsize=4096)
def _stage_s(
    updates: OwnerUpdates, chunks: Sequence[int], pp: int, stage: int, device: Device
) -> tuple[float, float]:
    """Of all tensors of a stage together: those of all ranks, and those of experts."""
    whole, seconds = updates.whole, [0.0, 0.0]
    for tensor, count in updates.of_stage(chunks, pp, stage).items():
        times, products = whole.products(tensor.shape, updates.own)
        moved_s = whole.moved_bytes * prod(tensor.shape) / device.memory
        products_s = sum(matmul_s(*sizes, device, plain=True) for sizes in products)
        seconds[tensor.expert] += count * (moved_s + times * products_s)
    return seconds[0], seconds[1]
