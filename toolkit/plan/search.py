"""The planner's search: every possible layout, which of them fit, and the fastest first.

A layout with recompute is slower than the same layout without. So each micro batch recomputes
only as much as needed to fit, or to leave a margin: logits before layers. And its memory is
looked at only once no other layout is faster than it would be without recompute.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice, takewhile, tee
from typing import Literal, NamedTuple

from toolkit.layout import Layout, LossKernel, Pair, Recompute, stage_layers
from toolkit.plan.cost.memory import (
    Memory,
    building_gib,
    offloaded_bytes,
    peak_memory,
)
from toolkit.plan.cost.time import step_time
from toolkit.plan.cost.workload import Workload
from toolkit.plan.dimensions import DIMENSION
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.models import can_recompute_some
from toolkit.plan.space import Fallback, PartialLayout, fallbacks, no_layout, partial_layouts
from toolkit.text.units import GIB

TIE = 0.03
"""Layouts whose predicted times differ by less count as equally fast. Measured ratios of two
layouts of one job differ from predicted ones by 0.7 to 4.2% on average in the published
measurements of three sources (docs/planner.md)."""
MARGIN = 0.05
"""Share of a layout's predicted memory that must also be free for it to fit with a margin.
Published peaks differ from predicted ones by 0.5 to 4.0% on average, by source, and 126 of 130
rehearsed ranks need at most 5% more than predicted (docs/planner.md)."""
WORTH = 0.1
"""A layout with a margin of memory, or of a simpler kind, is chosen before one that is up to so
much faster."""
FAST_LINKS = ("nvlink", "xgmi", "shared")
"""Links that are fast enough for tensor groups, which communicate in every layer."""
_PARTS = [
    DIMENSION[field]
    for field in (
        "tp", "pp", "vpp", "stages", "cp", "ep", "replicate", "offload_optimizer",
        "offload_parameters", "recompute", "loss", "exchange",
    )
]  # fmt: skip
"""What complicates a layout, besides its kind."""
Room = Literal["fits", "tight", "does not fit"]
Kind = tuple[bool, bool, int]
"""How simple layouts are: whether states are offloaded, whether the model is megatron-core's,
and the ZeRO stage. The lowest that will do is chosen."""


# One layout


class Candidate(NamedTuple):
    """A layout with its memory and speed."""

    pair: Pair
    layout: Layout
    memory_gib: float
    """Peak of the fullest device: in training, or while the model is built."""
    states_gib: float
    """The part of weights, gradients and optimizer states."""
    host_gib: float
    """Host memory of one node for offload, and checkpoints in memory."""
    nvme_gib: float
    """Disk space of one node for offload."""
    step_s: float | None
    """None if it does not fit; then its speed was not computed."""
    capacity_gib: float | None
    """Memory of a device; None where it is not limited (a CPU)."""

    @property
    def degrees(self) -> tuple[Pair, int, int, int, int]:
        """Key that distinguishes strategies from variants of the same strategy."""
        layout = self.layout
        return self.pair, layout.tp, layout.pp, layout.cp, layout.ep

    @property
    def moving_parts(self) -> int:
        """How much of it is not plain data parallelism with transformers' model."""
        used = sum(one.used(self.layout) for one in _PARTS)
        return used + isinstance(self.layout.recompute, int) + (self.pair.model != "hf")


def kind_of(pair: Pair, layout: Layout, cluster: Cluster) -> Kind:
    """See `Kind`; on a CPU, whose memory is not limited, ZeRO stages differ in nothing, and
    stage 0 is no simpler than 1."""
    away = (layout.offload_optimizer, layout.offload_parameters) != ("none", "none")
    stage = 0 if cluster.gpu.memory_gib is None else max(1, layout.zero_stage)
    return away, pair.model != "hf", stage


@lru_cache(maxsize=1 << 16)
def demand(workload: Workload, layout: Layout, cluster: Cluster) -> Candidate:
    """Memory of one layout, without its speed."""
    memory = device_memory(workload, layout, cluster)
    needed = max(memory.total / GIB, building_gib(workload, layout))
    host = disk = 0.0
    places = layout.offload_optimizer, layout.offload_parameters
    if places != ("none", "none"):
        sizes = offloaded_bytes(workload, layout, cluster.gpus_per_node)
        host, disk = (nbytes / GIB for nbytes in sizes)
    states, capacity = memory.model_states / GIB, cluster.gpu.memory_gib
    return Candidate(workload.pair, layout, needed, states, host, disk, None, capacity)


def device_memory(workload: Workload, layout: Layout, cluster: Cluster) -> Memory:
    """Memory of the fullest device; a CPU has no CUDA context."""
    return peak_memory(workload, layout, on_device=cluster.gpu.memory_gib is not None)


class Resource(NamedTuple):
    """What a layout needs of some memory; sizes in GiB."""

    needed: float
    capacity: float
    where: str
    """`per GPU`."""


def resources(one: Candidate, cluster: Cluster) -> Iterator[Resource]:
    """Device, host and disks; processes without accelerators share their node's memory."""
    host = one.host_gib
    if one.capacity_gib is None:
        host += one.memory_gib * min(cluster.gpus_per_node, one.layout.world)
    else:
        yield Resource(one.memory_gib, one.capacity_gib, "per GPU")
    yield Resource(host, cluster.host_memory_gib, "of host memory per node")
    yield Resource(one.nvme_gib, cluster.nvme_gib, "of disk per node")


def room(one: Candidate, cluster: Cluster) -> Room:
    """Whether a layout fits, with or without a margin for the error of its memory."""
    first, *others = resources(one, cluster)
    if any(needed > capacity for needed, capacity, _ in (first, *others)):
        return "does not fit"
    return "fits" if first.needed * (1 + MARGIN) <= first.capacity else "tight"


# All layouts


@dataclass(frozen=True)
class Search:
    """The result of the search for a job on a cluster."""

    job: PlanRequest
    cluster: Cluster
    fallback: Fallback
    """The least fallback with which anything fits; the largest one if nothing does."""
    partial: tuple[PartialLayout, ...]
    """Every partial layout with it. Where none of these that has a margin of memory is chosen,
    those with more offload, too."""

    @property
    def ranked(self) -> Iterator[Candidate]:
        """Layouts that fit, fastest first; each is evaluated when it is first asked for."""
        return copy(self._ranked)

    @cached_property
    def _ranked(self) -> Iterator[Candidate]:
        return tee(_by_time(self.partial, self.cluster), 1)[0]

    @cached_property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return any(
            self.room(_smallest(one, self.cluster)) != "does not fit" for one in self.partial
        )

    def room(self, one: Candidate) -> Room:
        """See `room`."""
        return room(one, self.cluster)

    def with_margin(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Those that fit with a margin of memory."""
        return (one for one in candidates if self.room(one) == "fits")

    @cached_property
    def best(self) -> Candidate:
        """The chosen layout, or the one nearest to fitting.

        Of the layouts that are at most `WORTH` slower than the fastest, those with a margin of
        memory if there are any; of these the simplest kind, and of that kind those that are as
        fast as its fastest within the planner's error.
        """
        if not self.fits:
            return self.nearest
        able = _as_fast(self.ranked, WORTH)
        if any(self.with_margin(able)):
            able = _as_fast(self.with_margin(self.ranked), WORTH)
        simplest = min(map(self.kind, able))
        same = [one for one in able if self.kind(one) == simplest]
        return min(_as_fast(same, TIE), key=_drawbacks)

    def kind(self, one: Candidate) -> Kind:
        """See `Kind`."""
        return kind_of(one.pair, one.layout, self.cluster)

    @cached_property
    def nearest(self) -> Candidate:
        """The smallest of those that do not fit."""
        smallest = (_smallest(one, self.cluster) for one in self.partial)
        too_large = (one for one in smallest if self.room(one) == "does not fit")
        return min(too_large, key=lambda one: (one.memory_gib, one.host_gib))

    @cached_property
    def fitting(self) -> list[Candidate]:
        """All that fit, best first, the others by time."""
        others = (one for one in self.ranked if one is not self.best)
        return [self.best, *others] if self.fits else []

    def strategies(self, most: int) -> list[Candidate]:
        """The best of each engine and set of degrees, best first."""
        found: dict[object, Candidate] = {}
        for one in chain((self.best,), self.ranked):
            found.setdefault(one.degrees, one)
            if len(found) == most:
                break
        return [*found.values()]

    def shortlist(self, most: int) -> list[Candidate]:
        """The best strategies, at least one of them with a margin of memory if any has one;
        the nearest layout if nothing fits."""
        found = self.strategies(most)
        if any(self.with_margin(found)):
            return found
        safest = [*islice(self.with_margin(self.ranked), 1)]
        return [*found[: max(1, most - 1)], *safest] if safest else found


def search(job: PlanRequest, cluster: Cluster) -> Search:
    """Search every layout of `job` on `cluster`; fallbacks that cost speed only if nothing fits
    without them, and offload also if nothing with a margin of memory is chosen without it.

    Raises PlanError if no layout suits the model or spreads the batch.
    """
    together = cluster.island if cluster.node_link.kind in FAST_LINKS else 1
    found, tried = None, fallbacks(job, together)
    for fallback in tried:
        found = _search(job, cluster, fallback) or found
        if found is not None and found.fits:
            break
    if found is None:
        raise no_layout(job, tried)
    first, on_cpu = found.fallback, cluster.gpu.memory_gib is None
    if on_cpu or not found.fits:  # a CPU would offload to its own memory
        return found
    for one in tried[tried.index(first) + 1 :]:
        if found.room(found.best) == "fits":
            break
        same = one._replace(largest_tensor=first.largest_tensor)
        if one.offload == first.offload or one.context != first.context:
            continue
        if (other := _search(job, cluster, same)) is not None:
            found = replace(found, partial=(*found.partial, *other.partial))
    return found


def _search(job: PlanRequest, cluster: Cluster, fallback: Fallback) -> Search | None:
    """The search with at most this fallback; None if there is no layout."""
    partial = tuple(one for one in partial_layouts(job, fallback) if one.micro_batches)
    return Search(job, cluster, fallback, partial) if partial else None


def _as_fast(by_time: Iterable[Candidate], within: float) -> list[Candidate]:
    """Those that are slower than the first by at most this share."""
    found = iter(by_time)
    fastest = next(found)
    limit_s = (1 + within) * _seconds(fastest)
    return [fastest, *takewhile(lambda one: _seconds(one) <= limit_s, found)]


def _by_time(every: Iterable[PartialLayout], cluster: Cluster) -> Iterator[Candidate]:
    """Layouts that fit, fastest first. Until one can be next, its partial layout and its micro
    batch wait in its place, with their time without recompute, which is the least."""
    number = count()  # equally fast ones stay in order
    waiting: list[tuple[float, int, PartialLayout | Candidate, int]] = []
    for partial in every:
        if room(_smallest(partial, cluster), cluster) != "does not fit":
            for size in partial.micro_batches:
                layout = partial.split(size, *partial.recomputes[0])
                least_s = _step_s(partial.workload, layout, cluster)
                waiting.append((least_s, next(number), partial, size))
    heapify(waiting)
    while waiting:
        _, _, found, size = heappop(waiting)
        if isinstance(found, Candidate):
            yield found
            continue
        for one in _fitting(found, cluster, size):
            heappush(waiting, (_seconds(one), next(number), one, size))


# The batch splits and recomputes of a partial layout


def _smallest(partial: PartialLayout, cluster: Cluster) -> Candidate:
    """The one that needs least memory."""
    return _measured(partial, cluster, partial.micro_batches[0], partial.recomputes[-1])


def _fitting(partial: PartialLayout, cluster: Cluster, size: int) -> Iterator[Candidate]:
    """Layouts with this micro batch that fit: with the least of the usual recomputes, and those
    of some layers that are faster or leave a margin."""
    for way in partial.recomputes:
        one = _measured(partial, cluster, size, way)
        if room(one, cluster) != "does not fit":
            for found in (one, *_recomputing_some(partial, cluster, one)):
                step_s = _step_s(partial.workload, found.layout, cluster)
                yield found._replace(step_s=step_s)
            return


def _recomputing_some(
    partial: PartialLayout, cluster: Cluster, fits: Candidate
) -> Iterator[Candidate]:
    """Where a layout recomputes all layers, or leaves no margin of memory: the same with as
    few recomputed layers as leave one, or else as fit."""
    workload, recomputes = partial.workload, partial.recomputes
    most = max(stage_layers(workload.spec.layers, *fits.layout.division))
    able = can_recompute_some(workload.spec, partial.pair)
    if not able or not {"none", "full"} <= {way for way, _ in recomputes} or most == 1:
        return
    full, size = fits.layout.recompute == "full", fits.layout.micro_batch
    if not full and room(fits, cluster) == "fits":
        return
    counts: list[Recompute] = ["none", *range(1, most)]
    for loss in dict.fromkeys(loss for _, loss in recomputes):
        # Memory shrinks with every recomputed layer.
        for enough in ("fits", "tight") if full else ("fits",):
            index = bisect_left(
                counts,
                True,
                key=lambda count: (
                    room(_measured(partial, cluster, size, (count, loss)), cluster)
                    in ("fits", enough)
                ),
            )
            if index < len(counts):
                yield _measured(partial, cluster, size, (counts[index], loss))
                break


def _measured(
    partial: PartialLayout, cluster: Cluster, size: int, way: tuple[Recompute, LossKernel]
) -> Candidate:
    """Memory with this micro batch and recompute."""
    return demand(partial.workload, partial.split(size, *way), cluster)


@lru_cache(maxsize=1 << 15)
def _step_s(workload: Workload, layout: Layout, cluster: Cluster) -> float:
    """Kept, as explanations search the same layouts again."""
    return step_time(workload, layout, cluster).total_s


def _drawbacks(one: Candidate) -> tuple[float, ...]:
    """What decides between equally fast layouts, the least first: memory in excess of what
    leaves a margin, the number of parallel dimensions and other techniques, their degrees, and
    memory; on CPUs, where memory is not limited, time before memory."""
    if one.capacity_gib is None:
        return _seconds(one), one.states_gib, one.moving_parts
    layout = one.layout
    scarce = max(one.memory_gib, one.capacity_gib / (1 + MARGIN))
    degrees = layout.tp + layout.pp + layout.vpp + layout.cp + layout.ep
    return scarce, one.moving_parts, degrees, one.memory_gib


def _seconds(one: Candidate) -> float:
    assert one.step_s is not None, "only what fits is ranked"
    return one.step_s
