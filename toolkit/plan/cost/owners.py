"""Optimizers whose updates need whole tensors, each computed by one rank, its owner
(`toolkit/engines/owners.py`): the work of the busiest owner of a pipeline stage."""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import prod

from toolkit.layout import Layout, stage_layers
from toolkit.plan.cost.operators import Device, matmul_s
from toolkit.plan.cost.owned import OwnerUpdates
from toolkit.plan.cost.traffic import PlacedLayout
from toolkit.plan.cost.workload import Workload


def owner_s(place: PlacedLayout, stage: int, device: Device) -> float:
    """Seconds that the busiest rank of a pipeline stage needs for the tensors that it owns."""
    updates, layout = place.workload.updates, place.layout
    if updates is None:
        return 0.0
    ranks = layout.world // layout.pp
    if updates.whole.by_replicas and replicated(layout):
        ranks = layout.ep
    chunks = stage_layers(place.workload.spec.layers, *layout.division)
    return _owner_s(updates, chunks, layout.pp, stage, ranks, layout.ep, device)


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
