"""The planner's search: every possible layout, which of them fit, and the fastest first.

A layout with recompute is slower than the same layout without. So each micro batch recomputes
only as much as needed to fit, or to leave a margin: logits before layers. And its memory is
looked at only once no other layout is faster than it would be without recompute.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import chain, count, takewhile, tee

from toolkit.layout import LossKernel, Recompute, stage_layers
from toolkit.plan.dimensions import DIMENSIONS
from toolkit.plan.estimate import MARGIN, Estimate, estimate, step_s
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.models import can_recompute_some
from toolkit.plan.space import PartialLayout, bounds, no_layout, partial_layouts

TIE = 0.03
"""Layouts whose predicted times differ by less count as equally fast. Measured ratios of two
layouts of one job differ from predicted ones by 0.7 to 4.2% on average in the published
measurements of three sources (docs/how-it-is-tested.md)."""
WORTH = 0.1
"""A layout with a margin of memory, or of a simpler kind, is chosen before one that is up to so
much faster."""
FAST_LINKS = ("nvlink", "xgmi", "shared")
"""Links that are fast enough for tensor groups, which communicate in every layer."""
Kind = tuple[bool, bool, int]
"""How simple layouts are: whether states are offloaded, whether the model is megatron-core's,
and the ZeRO stage. The lowest that will do is chosen."""


def kind_of(one: Estimate) -> Kind:
    """See `Kind`. On a CPU, whose memory is not limited, ZeRO stages differ in nothing, and
    stage 0 is no simpler than 1."""
    layout = one.layout
    away = (layout.offload_optimizer, layout.offload_parameters) != ("none", "none")
    stage = 0 if one.capacity_gib is None else max(1, layout.zero_stage)
    return away, one.pair.model != "hf", stage


def moving_parts(one: Estimate) -> int:
    """How much of it is not plain data parallelism with transformers' model."""
    used = sum(part.used(one.layout) for part in DIMENSIONS if part.field != "micro_batch")
    return used + isinstance(one.layout.recompute, int) + (one.pair.model != "hf")


# All layouts


@dataclass(frozen=True)
class Search:
    """The result of the search for a job on a cluster."""

    job: PlanRequest
    cluster: Cluster
    partial: tuple[PartialLayout, ...]
    """Every partial layout within the bounds of the search."""

    @property
    def ranked(self) -> Iterator[Estimate]:
        """Layouts that fit, fastest first. Each is evaluated when it is first asked for."""
        return copy(self._ranked)

    @cached_property
    def _ranked(self) -> Iterator[Estimate]:
        return tee(_by_time(self.partial, self.cluster), 1)[0]

    @cached_property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return any(_smallest(one, self.cluster).fits for one in self.partial)

    def with_margin(self, candidates: Iterable[Estimate]) -> Iterator[Estimate]:
        """The candidates that fit with a margin of memory."""
        return (one for one in candidates if one.room == "fits")

    @cached_property
    def best(self) -> Estimate:
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
        simplest = min(map(kind_of, able))
        same = [one for one in able if kind_of(one) == simplest]
        return min(_as_fast(same, TIE), key=_drawbacks)

    @cached_property
    def nearest(self) -> Estimate:
        """The smallest of those that do not fit."""
        smallest = (_smallest(one, self.cluster) for one in self.partial)
        too_large = (one for one in smallest if not one.fits)
        return min(too_large, key=lambda one: (one.memory_gib, one.host_gib))

    @cached_property
    def fitting(self) -> list[Estimate]:
        """All that fit, best first, the others by time."""
        others = (one for one in self.ranked if one is not self.best)
        return [self.best, *others] if self.fits else []

    def strategies(self, most: int, *, stages: bool = False) -> list[Estimate]:
        """At most `most` estimates, best first: the best of each engine and set of degrees.
        With `stages`, the best of each ZeRO stage as well. The nearest if nothing fits."""
        found: dict[object, Estimate] = {}
        for one in chain((self.best,), self.ranked):
            layout = one.layout
            stage = layout.zero_stage if stages and layout.dp > 1 else None
            found.setdefault((one.pair, stage, layout.tp, layout.pp, layout.cp, layout.ep), one)
            if len(found) == most:
                break
        return [*found.values()]


def search(job: PlanRequest, cluster: Cluster) -> Search:
    """Search every layout of `job` on `cluster`: offload, tensor groups over slow links, and
    context groups for short rows only where nothing with a margin of memory is chosen without
    them.

    Raises PlanError if no layout suits the model or spreads the batch.
    """
    together = cluster.island if cluster.node_link.kind in FAST_LINKS else 1
    for within in bounds(job, together):
        partial = tuple(one for one in partial_layouts(job, within) if one.micro_batches)
        found = Search(job, cluster, partial)
        # A CPU would offload to its own memory.
        if found.fits and (cluster.gpu.memory_gib is None or found.best.room == "fits"):
            return found
    if not partial:
        raise no_layout(job, within)
    return found


def _as_fast(by_time: Iterable[Estimate], within: float) -> list[Estimate]:
    """The estimates that are slower than the first by at most the share `within`."""
    found = iter(by_time)
    fastest = next(found)
    limit_s = (1 + within) * fastest.step_s
    return [fastest, *takewhile(lambda one: one.step_s <= limit_s, found)]


def _by_time(every: Iterable[PartialLayout], cluster: Cluster) -> Iterator[Estimate]:
    """Layouts that fit, fastest first. Until one can be next, its partial layout and its micro
    batch wait in its place, with their time without recompute, which is the least."""
    number = count()  # equally fast ones stay in order
    waiting: list[tuple[float, int, PartialLayout | Estimate, int]] = []
    for partial in every:
        if _smallest(partial, cluster).fits:
            for size in partial.micro_batches:
                layout = partial.split(size, *partial.recomputes[0])
                least_s = step_s(partial.workload, layout, cluster)
                waiting.append((least_s, next(number), partial, size))
    heapify(waiting)
    while waiting:
        _, _, found, size = heappop(waiting)
        if isinstance(found, Estimate):
            yield found
            continue
        for one in _fitting(found, cluster, size):
            heappush(waiting, (one.step_s, next(number), one, size))


# The batch splits and recomputes of a partial layout


def _smallest(partial: PartialLayout, cluster: Cluster) -> Estimate:
    """The one that needs least memory."""
    return _measured(partial, cluster, partial.micro_batches[0], partial.recomputes[-1])


def _fitting(partial: PartialLayout, cluster: Cluster, size: int) -> Iterator[Estimate]:
    """Layouts with this micro batch that fit: with the least of the usual recomputes, and those
    of some layers that are faster or leave a margin."""
    for way in partial.recomputes:
        one = _measured(partial, cluster, size, way)
        if one.fits:
            yield from (one, *_recomputing_some(partial, cluster, one))
            return


def _recomputing_some(
    partial: PartialLayout, cluster: Cluster, fits: Estimate
) -> Iterator[Estimate]:
    """Where a layout recomputes all layers, or leaves no margin of memory: the same with as
    few recomputed layers as leave one, or else as fit."""
    workload, recomputes = partial.workload, partial.recomputes
    most = max(stage_layers(workload.spec.layers, *fits.layout.division))
    able = can_recompute_some(workload.spec, partial.pair)
    if not able or not {"none", "full"} <= {way for way, _ in recomputes} or most == 1:
        return
    full, size = fits.layout.recompute == "full", fits.layout.micro_batch
    if not full and fits.room == "fits":
        return
    counts: list[Recompute] = ["none", *range(1, most)]
    for loss in dict.fromkeys(loss for _, loss in recomputes):
        # Memory shrinks with every recomputed layer.
        for enough in ("fits", "tight") if full else ("fits",):
            index = bisect_left(
                counts,
                True,
                key=lambda count: (
                    _measured(partial, cluster, size, (count, loss)).room in ("fits", enough)
                ),
            )
            if index < len(counts):
                yield _measured(partial, cluster, size, (counts[index], loss))
                break


def _measured(
    partial: PartialLayout, cluster: Cluster, size: int, way: tuple[Recompute, LossKernel]
) -> Estimate:
    """Memory with this micro batch and recompute."""
    return estimate(partial.workload, partial.split(size, *way), cluster)


def _drawbacks(one: Estimate) -> tuple[float, ...]:
    """Sort key of equally fast layouts, the least first: memory in excess of what leaves a
    margin, the number of parallel dimensions and other techniques, their degrees, and memory.
    On CPUs, where memory is not limited, time before memory."""
    if one.capacity_gib is None:
        return one.step_s, one.memory.model_states, moving_parts(one)
    layout = one.layout
    scarce = max(one.memory_gib, one.capacity_gib / (1 + MARGIN))
    degrees = layout.tp + layout.pp + layout.vpp + layout.cp + layout.ep
    return scarce, moving_parts(one), degrees, one.memory_gib
