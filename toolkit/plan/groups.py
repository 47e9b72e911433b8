"""Uneven work on a cluster of different accelerators: layers of pipeline stages and samples of
data-parallel ranks in proportion to their speed.

The rest of the search is that of equal accelerators: each of these layouts is evaluated, and
the fastest that fits is chosen. States that ZeRO shards stay even.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from math import gcd

from toolkit.hardware.cluster import Cluster
from toolkit.layout import Layout
from toolkit.plan.cost.placement import splits_groups
from toolkit.plan.cost.time import stage_seconds
from toolkit.plan.space import PartialLayout
from toolkit.recipe.schema import TrainingSection

MEMORY_WEIGHTS = (0.0, 0.5, 1.0)
"""Layers are divided by speed (0), by memory (1), or between."""
MOST_SAMPLES = 16
"""Of a rank's micro batch, in the ratios of ranks that are tried."""
RATIOS = 2
"""How many of them are tried, the fastest first; each with larger micro batches, too."""


def spread(
    partial: PartialLayout, cluster: Cluster, training: TrainingSection
) -> Iterator[PartialLayout]:
    """The partial layout, and on different accelerators those with uneven work; none where a
    tensor or context group would consist of different ones."""
    if not cluster.groups:
        yield partial
    elif not splits_groups(partial.layout, cluster):
        for one in _with_stages(partial, cluster):
            yield one
            yield from _with_shares(one, cluster, training)


def _with_stages(partial: PartialLayout, cluster: Cluster) -> Iterator[PartialLayout]:
    """As it is, and with layers divided by the stages' speed and memory."""
    yield partial
    layout, layers = _usual(partial), partial.workload.spec.layers
    if layout.pp == 1 or layout.stages or layers % layout.vpp:
        return
    each = layout.world // layout.pp
    memory = [
        min(
            cluster.kind_of(rank).gpu.memory_gib or 1.0
            for rank in range(stage * each, (stage + 1) * each)
        )
        for stage in range(layout.pp)
    ]
    seconds = stage_seconds(partial.workload, layout, cluster)
    found = {
        tuple(
            count // layout.vpp
            for count in _divided(seconds, memory, weight, (layers, layout.vpp))
        )
        * layout.vpp
        for weight in MEMORY_WEIGHTS
    }
    for stages in sorted(found):
        yield replace(partial, layout=replace(partial.layout, stages=stages))


def _divided(
    seconds: Sequence[tuple[float, float]],
    memory: Sequence[float],
    weight: float,
    layers: tuple[int, int],
) -> list[int]:
    """Layers of each stage, so many in all, in units of so many: each unit goes where it costs
    least; see `MEMORY_WEIGHTS`."""
    total, unit = layers
    counts = [unit] * len(seconds)
    factors = [
        (max(memory) / one) ** weight * (t**-weight)
        for one, (t, _) in zip(memory, seconds, strict=True)
    ]

    def cost(stage: int) -> float:
        layer_s, ends_s = seconds[stage]
        return float(((counts[stage] + unit) * layer_s + ends_s) * factors[stage])

    for _ in range(total // unit - len(counts)):
        counts[min(range(len(counts)), key=cost)] += unit
    return counts


def _with_shares(
    partial: PartialLayout, cluster: Cluster, training: TrainingSection
) -> Iterator[PartialLayout]:
    """With samples of data-parallel ranks in proportion to their speed."""
    layout, wanted = partial.layout, training.micro_batch_size
    if layout.shares or layout.dp == 1:
        return
    seconds = _sample_seconds(partial, cluster)
    levels = sorted(Counter(seconds).items())
    if len(levels) == 1 or len(levels) > 3:
        return
    rounds = layout.pp if layout.vpp > 1 else 1
    for ratio in islice(_ratios(levels, training.batch_unit // rounds), RATIOS):
        by_level = dict(zip((second for second, _ in levels), ratio, strict=True))
        for times in range(1, training.batch_unit + 1):
            shares = tuple(times * by_level[one] for one in seconds)
            if sum(shares) * rounds > training.batch_unit:
                break
            if training.batch_unit % (sum(shares) * rounds) or wanted not in (
                "auto",
                max(shares),
            ):
                continue
            steps = max(shares) * (training.global_batch_size // sum(shares))
            divided = replace(layout, shares=shares, gradient_accumulation=steps)
            yield replace(partial, layout=divided, micro_batches=(max(shares),))


def _ratios(levels: Sequence[tuple[float, int]], most: int) -> Iterator[tuple[int, ...]]:
    """Samples of the ranks of each level of speed, the fastest ratio first; `levels`: seconds
    of a sample, and how many ranks need so long."""

    def sample_s(ratio: tuple[int, ...]) -> float:
        pairs = [*zip(ratio, levels, strict=True)]
        longest = max(samples * second for samples, (second, _) in pairs)
        return longest / sum(samples * count for samples, (_, count) in pairs)

    every = product(range(1, MOST_SAMPLES + 1), repeat=len(levels))
    fit = [
        ratio
        for ratio in every
        if gcd(*ratio) == 1
        and len({*ratio}) > 1
        and most % sum(n * count for n, (_, count) in zip(ratio, levels, strict=True)) == 0
    ]
    yield from sorted(fit, key=sample_s)


def _sample_seconds(partial: PartialLayout, cluster: Cluster) -> list[float]:
    """Seconds of a sample on each data-parallel rank: of its slowest stage, without ends."""
    layout, block = _usual(partial), partial.layout.tp * partial.layout.cp
    found = []
    layer_s = {
        kind: stage_seconds(partial.workload, layout, kind)[0][0] for kind in cluster.kinds
    }
    for rank in range(layout.dp):
        ranks = [(stage * layout.dp + rank) * block for stage in range(layout.pp)]
        found.append(max(layer_s[cluster.kind_of(one)] for one in ranks))
    return found


def _usual(partial: PartialLayout) -> Layout:
    """The layout with a micro batch of the middle of those that are possible."""
    sizes = partial.micro_batches or (1,)
    return replace(partial.layout, micro_batch=sizes[len(sizes) // 2])
