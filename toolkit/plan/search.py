"""The planner's search: every possible layout, which of them fit, and the fastest first.

Exhaustive, with two shortcuts that exclude no optimum. A layout with recompute is slower than
the same layout without, so each one recomputes only as much as needed to fit, or to leave a
margin: logits before layers. And memory grows with the micro batch, so once a size does not
fit, no larger one does.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from typing import Literal, NamedTuple

from toolkit.errors import PlanError
from toolkit.hardware.cluster import Cluster, LinkKind
from toolkit.layout import Layout, LossKernel, Pair, Recompute, stage_layers
from toolkit.plan.cost.memory import (
    Memory,
    building_gib,
    host_bytes,
    nvme_bytes,
    peak_memory,
    stage_memory,
)
from toolkit.plan.cost.placement import StagePart, splits_groups, stage_parts
from toolkit.plan.cost.time import step_time
from toolkit.plan.cost.workload import Workload
from toolkit.plan.dimensions import DIMENSIONS
from toolkit.plan.groups import spread
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.legality import table
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
MARGIN_COST = 0.1
"""How much slower a layout with a margin may be than the fastest one and still be chosen."""
UNNEEDED = "recompute more than they must in order to fit"
"""Why layouts are rejected that also fit with less recompute: those are faster."""
FAST_LINKS = ("nvlink", "xgmi", "shared")
"""Links that are fast enough for the collectives of every layer."""
Room = Literal["fits", "tight", "does not fit"]


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
    """Memory of the fullest device; None where it is not limited (a CPU)."""

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
    """The least fallback with which anything fits; the largest one if nothing does. Where no
    layout with it that has a margin of memory is chosen, `fitting` has more offload, too."""
    fitting: tuple[Candidate, ...]
    """Best first; empty where nothing fits."""
    too_large: tuple[Candidate, ...]
    """The smallest of the layouts that do not fit with any batch split and recompute."""
    considered: int
    """Possible layouts."""
    rejected: Mapping[str, int]
    """Those of them that are not in `fitting`, counted by reason."""

    @property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return bool(self.fitting)

    @property
    def best(self) -> Candidate:
        """The chosen layout: the best that fits, or the one nearest to fitting."""
        return self.fitting[0] if self.fitting else self.nearest

    @cached_property
    def nearest(self) -> Candidate:
        """Of those that do not fit, the smallest."""
        return min(self.too_large, key=lambda one: (one.memory_gib, one.host_gib))

    @property
    def strategies(self) -> list[Candidate]:
        """The best of each engine and set of degrees, best first."""
        found: dict[object, Candidate] = {}
        for one in self.fitting:
            found.setdefault(one.degrees, one)
        return list(found.values())

    def shortlist(self, most: int) -> list[Candidate]:
        """The best strategies, at least one of them with a margin of memory if any has one;
        the nearest layout if nothing fits."""
        found = self.strategies[:most] or [self.best]
        roomy = [one for one in self.fitting if room(one, self.cluster) == "fits"]
        if roomy and not {*found} & {*roomy}:
            found = [*found[: max(1, most - 1)], roomy[0]]
        return found


def search(job: PlanRequest, cluster: Cluster) -> Search:
    """Search every layout of `job` on `cluster`; fallbacks that cost speed only if nothing fits
    without them, and offload also if nothing with a margin of memory is chosen without it.

    Raises PlanError if no layout suits the model or spreads the batch.
    """
    found, tried = None, fallbacks(job, cluster.island)
    for fallback in tried:
        found = _search(job, cluster, fallback) or found
        if found is not None and found.fits:
            break
    if found is None:
        raise _no_layout(job, cluster, tried)
    return _with_offload(found, tried[tried.index(found.fallback) + 1 :])


def _with_offload(found: Search, further: Sequence[Fallback]) -> Search:
    """The same where the chosen layout has a margin of memory; otherwise next to layouts with
    more offload, until one with a margin is chosen."""
    first, cluster = found.fallback, found.cluster
    if cluster.gpu.memory_gib is None:  # a CPU: it would offload to its own memory
        return found
    for one in further:
        if not found.fits or room(found.best, cluster) == "fits":
            break
        same = replace(one, largest_tensor=first.largest_tensor)
        if one.offload == first.offload or one.context != first.context:
            continue
        other = _search(found.job, cluster, same)
        if other is not None and other.fits:
            found = replace(
                found,
                fitting=tuple(ranked([*found.fitting, *other.fitting], cluster)),
                considered=found.considered + other.considered,
                rejected=Counter(found.rejected) + Counter(other.rejected),
            )
    return found


def evaluate(workload: Workload, layout: Layout, cluster: Cluster) -> Candidate:
    """Memory and speed of one layout, whether it fits or not."""
    one = demand(workload, layout, cluster)
    return one._replace(step_s=step_time(workload, layout, cluster).total_s)


def demand(workload: Workload, layout: Layout, cluster: Cluster) -> Candidate:
    """Memory of one layout, without its speed."""
    memory, fullest = device_memory(workload, layout, cluster)
    needed = max(memory.total / GIB, building_gib(workload, layout))
    host = disk = 0.0
    places = layout.offload_optimizer, layout.offload_parameters
    if places != ("none", "none") or layout.offload_activations:
        host = host_bytes(workload, layout, cluster.gpus_per_node) / GIB
        disk = nvme_bytes(workload, layout, cluster.gpus_per_node) / GIB
    states, capacity = memory.model_states / GIB, fullest.cluster.gpu.memory_gib
    return Candidate(workload.pair, layout, needed, states, host, disk, None, capacity)


def device_memory(
    workload: Workload, layout: Layout, cluster: Cluster
) -> tuple[Memory, StagePart]:
    """Memory of the device that is fullest for its size, and its part of a stage; a CPU has no
    CUDA context."""
    usual = StagePart(cluster, layout.micro_batch)
    if cluster.gpu.memory_gib is None:
        return replace(peak_memory(workload, layout), context=0.0), usual
    if not cluster.groups:
        return peak_memory(workload, layout), usual
    return max(
        (
            (stage_memory(workload, part.of(layout), stage), part)
            for stage, parts in enumerate(stage_parts(layout, cluster))
            for part in parts
        ),
        key=lambda found: found[0].total / (found[1].cluster.gpu.memory_gib or inf),
    )


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

    @property
    def reason(self) -> str:
        """Why the layout is rejected."""
        return f"more than {self.capacity} GiB {self.where}"

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
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    rejected: Counter[str] = Counter()
    for one in partial_layouts(job, fallback):
        for partial in spread(one, cluster, job.training):
            if partial.micro_batches:
                _Splits(partial, cluster).fill(fitting, too_large, rejected)
    if not fitting and not too_large:
        return None
    return Search(
        job,
        cluster,
        fallback,
        tuple(ranked(fitting, cluster)),
        tuple(too_large),
        len(fitting) + rejected.total(),
        +rejected,
    )


def _no_layout(job: PlanRequest, cluster: Cluster, tried: list[Fallback]) -> PlanError:
    """Why there is no layout: the batch, groups of different GPUs, or the model's shape."""
    layouts = [one.layout for fallback in tried for one in partial_layouts(job, fallback)]
    if not layouts:
        return no_degrees(job)
    first = layouts[0]
    if cluster.groups and splits_groups(first, cluster):
        block = first.tp * first.cp
        return PlanError(
            f"cluster.groups: groups of {block} ranks, tensor {first.tp} · "
            f"context {first.cp}, would reach across different GPUs",
            fix="leave parallel.tensor and parallel.context at auto, or state smaller ones",
        )
    return uneven_batch(job, min(layouts, key=lambda one: (one.dp, one.vpp)))


@dataclass(frozen=True)
class _Splits:
    """The batch splits and recomputes of a partial layout on a cluster."""

    partial: PartialLayout
    cluster: Cluster

    @cached_property
    def known(self) -> dict[Layout, Candidate]:
        """Evaluated layouts."""
        return _known(self.partial.workload, self.cluster)

    def fill(
        self,
        fitting: list[Candidate],
        too_large: list[Candidate],
        rejected: "Counter[str]",
    ) -> None:
        """Choose batch split and recompute; count what does not fit."""
        sizes, ways = self.partial.micro_batches, self.partial.recomputes
        smallest = self.measured(sizes[0], ways[-1])
        if missing := shortage(smallest, self.cluster):
            too_large.append(smallest)
            rejected[missing.reason] += len(sizes) * len(ways)
            return
        least, reason = 0, ""  # the larger a micro batch, the more must be recomputed
        for done, size in enumerate(sizes):
            for way in range(least, len(ways)):
                candidate = self.measured(size, ways[way])
                if not (missing := shortage(candidate, self.cluster)):
                    least = way
                    break
                reason = missing.reason
            else:
                rejected[reason] += (len(sizes) - done) * len(ways)
                return
            if least:
                rejected[reason] += least
            if unneeded := len(ways) - least - 1:
                rejected[UNNEEDED] += unneeded
            fitting.append(self.timed(candidate))
            for one in self.recomputing_some(candidate):
                rejected[UNNEEDED] -= isinstance(one.layout.recompute, str)  # now it is needed
                fitting.append(self.timed(one))

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
def _known(*_where: Workload | Cluster) -> dict[Layout, Candidate]:
    """The layouts of a workload on a cluster that earlier searches evaluated: explanations
    search the same ones again."""
    return {}


def ranked(fitting: list[Candidate], cluster: Cluster) -> list[Candidate]:
    """Fastest first; the chosen one in front."""
    if not fitting:
        return []
    found = sorted(fitting, key=_seconds)
    equal = equally_fast(found, cluster)
    if cluster.gpu.memory_gib is None:
        chosen = _preferred(equal)
    else:
        chosen = min(equal, key=lambda one: _drawbacks(one, cluster))
    return [chosen, *(one for one in found if one is not chosen)]


def equally_fast(found: Sequence[Candidate], cluster: Cluster) -> list[Candidate]:
    """Those of which one is chosen, fastest first: with a margin of memory, unless that costs
    more than `MARGIN_COST`, and as fast as the fastest of these within the planner's error."""
    fastest = min(found, key=_seconds)
    roomy = [one for one in found if room(one, cluster) == "fits"]
    limit = _seconds(fastest) * (1 + MARGIN_COST)
    if roomy and min(map(_seconds, roomy)) <= limit:
        found = roomy
    limit = min(map(_seconds, found)) * (1 + TIE)
    return sorted((one for one in found if _seconds(one) <= limit), key=_seconds)


def _drawbacks(one: Candidate, cluster: Cluster) -> tuple[bool, float, int, int, float]:
    """What decides between equally fast layouts, the least first: tensor groups over slow
    links, memory in excess of what leaves a margin, the number of parallel dimensions and
    other techniques, their degrees, and memory."""
    layout, capacity = one.layout, one.capacity_gib or 0.0
    scarce = max(one.memory_gib, capacity / (1 + MARGIN))
    degrees = layout.tp + layout.pp + layout.vpp + layout.cp + layout.ep
    slow_links = layout.tp > 1 and tensor_link(layout, cluster) not in FAST_LINKS
    return slow_links, scarce, moving_parts(one), degrees, one.memory_gib


def tensor_link(layout: Layout, cluster: Cluster) -> LinkKind:
    """The link over which tensor groups communicate."""
    within = layout.tp <= cluster.island
    return cluster.node_link.kind if within else cluster.network.kind


def _preferred(equal: list[Candidate]) -> Candidate:
    """The same if memory is not limited (a CPU): memory is not considered first.

    Nominal speeds do not distinguish engines, so the preferred one is chosen, with its fastest
    layout; of equally fast ones, the one with the smallest model states.
    """
    order = list(table())
    first = min(order.index(one.pair) for one in equal)
    return min(
        (one for one in equal if order.index(one.pair) == first),
        key=lambda one: (_seconds(one), one.states_gib, moving_parts(one)),
    )


def _seconds(one: Candidate) -> float:
    assert one.step_s is not None, "only what fits is ranked"
    return one.step_s


def moving_parts(one: Candidate) -> int:
    """Complexity of a layout: how much of it is not plain data parallelism with transformers'
    model."""
    values = vars(one.layout)
    of_layout = sum(dimension.parts(values[dimension.field]) for dimension in DIMENSIONS)
    return of_layout + (one.pair.model != "hf")
