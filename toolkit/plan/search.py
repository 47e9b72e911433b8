"""The planner's search: every possible layout, which of them fit, and the fastest first.

Exhaustive, with two shortcuts that exclude no optimum. A layout with recompute is slower than
the same layout without, so each one recomputes only as much as needed to fit, or to leave a
margin: logits before layers. And a layout is evaluated only once no other is faster than a
lower bound of its time, so those that are too slow to be chosen never are.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, islice, takewhile, tee
from typing import Literal, NamedTuple

from toolkit.errors import PlanError
from toolkit.hardware.cluster import Cluster
from toolkit.layout import Layout, LossKernel, Pair, Recompute, stage_layers
from toolkit.plan.cost.memory import (
    Memory,
    building_gib,
    offloaded_bytes,
    peak_memory,
)
from toolkit.plan.cost.time import least_step_s, step_time
from toolkit.plan.cost.workload import Workload
from toolkit.plan.dimensions import DIMENSIONS
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.models import can_recompute_some
from toolkit.plan.space import (
    Fallback,
    PartialLayout,
    fallbacks,
    no_degrees,
    partial_layouts,
    uneven_batch,
)
from toolkit.text.units import GIB

TIE = 0.03
"""Layouts whose predicted times differ by less count as equally fast. Measured ratios of two
layouts of one job differ from predicted ones by 0.7 to 4.2% on average in the published
measurements of three sources (docs/planner.md)."""
MARGIN = 0.05
"""Share of a layout's predicted memory that must also be free for it to fit with a margin.
Published peaks differ from predicted ones by 0.5 to 4.0% on average, by source, and 87 of 91
rehearsed ranks need at most 5% more than predicted (docs/planner.md)."""
WORTH = 0.1
"""A layout with a margin of memory, or of a simpler kind, is chosen before one that is up to so
much faster."""
FAST_LINKS = ("nvlink", "xgmi", "shared")
"""Links that are fast enough for tensor groups, which communicate in every layer."""
_ROUNDED = 1 - 1e-9
"""Sums of the same numbers in another order may differ."""
Room = Literal["fits", "tight", "does not fit"]
Kind = tuple[bool, bool, int]
"""How simple layouts are: whether states are offloaded, whether the model is megatron-core's,
and the ZeRO stage. The lowest that will do is chosen."""


class Candidate(NamedTuple):
    """A layout with its memory and speed."""

    pair: Pair
    layout: Layout
    memory_gib: float
    """Peak of the fullest device: in training, or while the model is built."""
    states_gib: float
    """Of that, weights, gradients and optimizer states."""
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


@dataclass(frozen=True)
class Search:
    """The result of the search for a job on a cluster."""

    job: PlanRequest
    cluster: Cluster
    fallback: Fallback
    """The least fallback with which anything fits; the largest one if nothing does."""
    splits: tuple["Splits", ...]
    """Every partial layout with it. Where none of these that has a margin of memory is chosen,
    those with more offload, too."""

    @cached_property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return any(one.fits for one in self.splits)

    def by_time(self, kind: "Kind | None" = None) -> Iterator[Candidate]:
        """Layouts that fit, fastest first; each is evaluated when it is first asked for."""
        if kind not in self._by_time:
            splits = [one for one in self.splits if kind in (None, one.kind)]
            self._by_time[kind] = tee(by_time(splits), 1)[0]
        return copy(self._by_time[kind])

    @cached_property
    def _by_time(self) -> dict["Kind | None", Iterator[Candidate]]:
        return {}

    @cached_property
    def equal(self) -> list[Candidate]:
        """Those of which one is chosen, fastest first: as fast as the fastest of their kind
        within the planner's error, the simplest kind whose fastest is at most `WORTH` slower
        than any; with a margin of memory, unless that costs more than `WORTH`."""

        def within(limit_s: float, kind: Kind | None = None) -> Iterator[Candidate]:
            return takewhile(lambda one: _seconds(one) <= limit_s, self.by_time(kind))

        fastest = next(self.by_time())
        near = within((1 + WORTH) * _seconds(fastest))
        roomy = next((one for one in near if self.room(one) == "fits"), None)
        limit_s = (1 + WORTH) * _seconds(roomy or fastest)
        for kind in sorted({one.kind for one in self.splits}):
            able = (one for one in within(limit_s, kind) if self.is_enough(one, roomy))
            if first := next(able, None):
                equal = within(min(limit_s, (1 + TIE) * _seconds(first)), kind)
                return [one for one in equal if self.is_enough(one, roomy)]
        raise AssertionError("the fastest is of a kind")

    def room(self, one: Candidate) -> Room:
        """See `room`."""
        return room(one, self.cluster)

    def is_enough(self, one: Candidate, roomy: Candidate | None) -> bool:
        """Whether it leaves a margin, if any near the fastest does."""
        return roomy is None or self.room(one) == "fits"

    @cached_property
    def best(self) -> Candidate:
        """The chosen layout: the best that fits, or the one nearest to fitting."""
        if not self.fits:
            return self.nearest
        on_cpu = self.cluster.gpu.memory_gib is None
        return min(self.equal, key=_drawbacks_on_cpu if on_cpu else _drawbacks)

    @cached_property
    def nearest(self) -> Candidate:
        """Of those that do not fit, the smallest."""
        too_large = (one.smallest for one in self.splits if not one.fits)
        return min(too_large, key=lambda one: (one.memory_gib, one.host_gib))

    @cached_property
    def fitting(self) -> list[Candidate]:
        """All that fit, best first, the others by time."""
        others = (one for one in self.by_time() if one is not self.best)
        return [self.best, *others] if self.fits else []

    def strategies(self, most: int) -> list[Candidate]:
        """The best of each engine and set of degrees, best first."""
        found: dict[object, Candidate] = {}
        for one in chain((self.best,), self.by_time()):
            found.setdefault(one.degrees, one)
            if len(found) == most:
                break
        return [*found.values()]

    def shortlist(self, most: int) -> list[Candidate]:
        """The best strategies, at least one of them with a margin of memory if any has one;
        the nearest layout if nothing fits."""
        found = self.strategies(most)
        if any(room(one, self.cluster) == "fits" for one in found):
            return found
        roomy = (one for one in self.by_time() if room(one, self.cluster) == "fits")
        safest = [*islice(roomy, 1)]
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
        raise _no_layout(job, tried)
    first, on_cpu = found.fallback, cluster.gpu.memory_gib is None
    if on_cpu or not found.fits:  # a CPU would offload to its own memory
        return found
    for one in tried[tried.index(first) + 1 :]:
        if room(found.best, cluster) == "fits":
            break
        same = replace(one, largest_tensor=first.largest_tensor)
        if one.offload == first.offload or one.context != first.context:
            continue
        if (other := _search(job, cluster, same)) is not None:
            found = replace(found, splits=(*found.splits, *other.splits))
    return found


def evaluate(workload: Workload, layout: Layout, cluster: Cluster) -> Candidate:
    """Memory and speed of one layout, whether it fits or not."""
    one = demand(workload, layout, cluster)
    return one._replace(step_s=step_time(workload, layout, cluster).total_s)


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


ON_DISKS = " on the disks"


class Shortage(NamedTuple):
    """A resource that a layout exceeds; sizes in GiB."""

    needed: str
    capacity: str
    where: str
    """`per GPU`."""
    on: str
    """The same in a comparison of layouts: ` on the host`; empty for a GPU."""
    missing: str

    def __str__(self) -> str:
        return f"{self.needed} of {self.capacity} GiB{self.on}"


def shortage(one: Candidate, cluster: Cluster) -> Shortage | None:
    """The resource that a layout exceeds; None if it fits."""
    capacity = one.capacity_gib
    if capacity is not None and one.memory_gib > capacity:
        needed, missing = f"{one.memory_gib:.1f}", f"{one.memory_gib - capacity:.1f}"
        return Shortage(needed, f"{capacity:g}", "per GPU", "", missing)
    host = one.host_gib if cluster.gpu.memory_gib is not None else _on_host(one, cluster)
    for size, capacity, where, on in (
        (
            host,
            cluster.host_memory_gib,
            "of host memory per node",
            " on the host",
        ),
        (one.nvme_gib, cluster.nvme_gib, "of disk per node", ON_DISKS),
    ):
        if size > capacity:
            missing = f"{size - capacity:,.0f}"
            return Shortage(f"{size:,.0f}", f"{capacity:,g}", where, on, missing)
    return None


def _on_host(one: Candidate, cluster: Cluster) -> float:
    """GiB of a node without accelerators, whose processes share its memory."""
    return one.host_gib + one.memory_gib * min(cluster.gpus_per_node, one.layout.world)


def room(one: Candidate, cluster: Cluster) -> Room:
    """Whether a layout fits, with or without a margin for the error of its memory."""
    if shortage(one, cluster):
        return "does not fit"
    needed, capacity = one.memory_gib, one.capacity_gib
    if capacity is None:
        needed, capacity = _on_host(one, cluster), cluster.host_memory_gib
    roomy = needed * (1 + MARGIN) <= capacity
    return "fits" if roomy else "tight"


def _search(job: PlanRequest, cluster: Cluster, fallback: Fallback) -> Search | None:
    """The search with at most this fallback; None if there is no layout."""
    splits = tuple(
        Splits(partial, cluster)
        for partial in partial_layouts(job, fallback)
        if partial.micro_batches
    )
    return Search(job, cluster, fallback, splits) if splits else None


def by_time(every: Sequence["Splits"]) -> Iterator[Candidate]:
    """Layouts that fit, fastest first. A micro batch is looked at once nothing else is faster
    than its lower bound: first its time without recompute, then the recompute that it needs."""
    waiting: list[tuple[float, int, int, int, Candidate | None]] = [
        (least_s, number, size, 0, None)
        for number, one in enumerate(every)
        for size, least_s in one.least_s
    ]
    heapify(waiting)
    while waiting:
        _, number, size, place, found = heappop(waiting)
        splits = every[number]
        if found is not None:
            yield found
        elif place == 0:
            heappush(waiting, (splits.without_recompute_s(size), number, size, 1, None))
        else:
            for place, one in enumerate(splits.fitting(size), 2):
                heappush(waiting, (_seconds(one), number, size, place, one))


def _no_layout(job: PlanRequest, tried: list[Fallback]) -> PlanError:
    """Why there is no layout: the batch, or the model's shape."""
    layouts = [one.layout for fallback in tried for one in partial_layouts(job, fallback)]
    if not layouts:
        return no_degrees(job)
    return uneven_batch(job, min(layouts, key=lambda one: (one.dp, one.vpp)))


@dataclass(frozen=True)
class Splits:
    """The batch splits and recomputes of a partial layout on a cluster."""

    partial: PartialLayout
    cluster: Cluster

    @cached_property
    def kind(self) -> Kind:
        """See `Kind`; on a CPU, whose memory is not limited, ZeRO stages differ in nothing, and
        stage 0 is no simpler than 1."""
        layout, limited = self.partial.layout, self.cluster.gpu.memory_gib is not None
        away = (layout.offload_optimizer, layout.offload_parameters) != ("none", "none")
        stage = max(1, layout.zero_stage) if limited else 0
        return away, self.partial.pair.model != "hf", stage

    @cached_property
    def known(self) -> dict[Layout, Candidate]:
        """Evaluated layouts."""
        return known(self.partial.workload, self.cluster)

    @cached_property
    def smallest(self) -> Candidate:
        """The one that needs least memory."""
        return self.measured(self.partial.micro_batches[0], self.partial.recomputes[-1])

    @cached_property
    def fits(self) -> bool:
        """Whether any fits."""
        return shortage(self.smallest, self.cluster) is None

    @cached_property
    def least_s(self) -> tuple[tuple[int, float], ...]:
        """Each micro batch, and a lower bound of the seconds of a step with it."""
        partial, sizes = self.partial, self.partial.micro_batches
        layout = partial.split(1, *partial.recomputes[0])
        bounds = least_step_s(partial.workload, layout, self.cluster, sizes)
        return tuple(zip(sizes, (_ROUNDED * one for one in bounds), strict=True))

    def without_recompute_s(self, size: int) -> float:
        """A lower bound that lacks only recompute."""
        if (least_s := self._without_recompute_s.get(size)) is None:
            layout = self.partial.split(size, *self.partial.recomputes[0])
            time = step_time(self.partial.workload, layout, self.cluster)
            least_s = self._without_recompute_s[size] = _ROUNDED * time.total_s
        return least_s

    @cached_property
    def _without_recompute_s(self) -> dict[int, float]:
        return {}

    def fitting(self, size: int) -> Iterator[Candidate]:
        """Layouts with this micro batch that fit: with the least of the usual recomputes, and
        those of some layers that are faster or leave a margin."""
        for way in self.partial.recomputes if self.fits else ():
            one = self.measured(size, way)
            if shortage(one, self.cluster) is None:
                yield from map(self.timed, (one, *self.recomputing_some(one)))
                return

    def recomputing_some(self, fits: Candidate) -> Iterator[Candidate]:
        """Where a layout recomputes all layers, or leaves no margin of memory: the same with as
        few recomputed layers as leave one, or else as fit."""
        workload, recomputes = self.partial.workload, self.partial.recomputes
        most = max(stage_layers(workload.spec.layers, *fits.layout.division))
        able = can_recompute_some(workload.spec, self.partial.pair)
        if not able or not {"none", "full"} <= {way for way, _ in recomputes} or most == 1:
            return
        full, size = fits.layout.recompute == "full", fits.layout.micro_batch
        if not full and room(fits, self.cluster) == "fits":
            return
        counts: list[Recompute] = ["none", *range(1, most)]
        for loss in dict.fromkeys(loss for _, loss in recomputes):
            for enough in ("fits", "tight") if full else ("fits",):

                def is_enough(
                    count: Recompute, loss: LossKernel = loss, enough: str = enough
                ) -> bool:
                    one = self.measured(size, (count, loss))
                    return room(one, self.cluster) in ("fits", enough)

                # Memory shrinks with every recomputed layer.
                index = bisect_left(counts, True, key=is_enough)
                if index < len(counts):
                    yield self.measured(size, (counts[index], loss))
                    break

    def measured(self, size: int, way: tuple[Recompute, LossKernel]) -> Candidate:
        """Memory with this micro batch and recompute."""
        layout = self.partial.split(size, *way)
        if (one := self.known.get(layout)) is None:
            one = self.known[layout] = demand(self.partial.workload, layout, self.cluster)
        return one

    def timed(self, one: Candidate) -> Candidate:
        """The same with its speed."""
        if one.step_s is None:
            time = step_time(self.partial.workload, one.layout, self.cluster)
            one = self.known[one.layout] = one._replace(step_s=time.total_s)
        return one


@lru_cache(maxsize=16)
def known(*_where: Workload | Cluster) -> dict[Layout, Candidate]:
    """The layouts of a workload on a cluster that earlier searches evaluated: explanations
    search the same ones again."""
    return {}


def _drawbacks(one: Candidate) -> tuple[float, int, int, float]:
    """What decides between equally fast layouts, the least first: memory in excess of what
    leaves a margin, the number of parallel dimensions and other techniques, their degrees, and
    memory."""
    layout, capacity = one.layout, one.capacity_gib or 0.0
    scarce = max(one.memory_gib, capacity / (1 + MARGIN))
    degrees = layout.tp + layout.pp + layout.vpp + layout.cp + layout.ep
    return scarce, moving_parts(one), degrees, one.memory_gib


def _drawbacks_on_cpu(one: Candidate) -> tuple[float, float, int]:
    """The same where memory is not limited."""
    return _seconds(one), one.states_gib, moving_parts(one)


def _seconds(one: Candidate) -> float:
    assert one.step_s is not None, "only what fits is ranked"
    return one.step_s


def moving_parts(one: Candidate) -> int:
    """Complexity of a layout: how much of it is not plain data parallelism with transformers'
    model."""
    values = vars(one.layout)
    of_layout = sum(dimension.parts(values[dimension.field]) for dimension in DIMENSIONS)
    return of_layout + (one.pair.model != "hf")
