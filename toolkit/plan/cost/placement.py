"""Which accelerators the ranks of a layout have on a cluster of several kinds.

Ranks fill groups of nodes in order, and are numbered tensor, context, data, pipeline: a
pipeline stage is a run of ranks, and so is a data-parallel rank in it.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from toolkit.hardware.cluster import Cluster
from toolkit.layout import Layout


class StagePart(NamedTuple):
    """Ranks of a pipeline stage with the same accelerator and samples per micro batch."""

    cluster: Cluster
    """Theirs."""
    samples: int

    def of(self, layout: Layout) -> Layout:
        """The layout as these ranks have it."""
        if self.samples == layout.micro_batch:
            return layout
        return replace(layout, micro_batch=self.samples, shares=())


def stage_parts(layout: Layout, cluster: Cluster) -> tuple[tuple[StagePart, ...], ...]:
    """The different ranks of each pipeline stage; where all accelerators are equal, those with
    most samples, for which the others wait."""
    if not cluster.groups:
        return ((StagePart(cluster, layout.micro_batch),),) * layout.pp
    return _stage_parts(layout.tp * layout.cp, layout.pp, layout.micro_batches, cluster)


@lru_cache(maxsize=1024)
def _stage_parts(
    block: int, pp: int, samples: tuple[int, ...], cluster: Cluster
) -> tuple[tuple[StagePart, ...], ...]:
    dp = len(samples)
    return tuple(
        tuple(
            dict.fromkeys(
                StagePart(cluster.kind_of((stage * dp + rank) * block), samples[rank])
                for rank in range(dp)
            )
        )
        for stage in range(pp)
    )


def splits_groups(layout: Layout, cluster: Cluster) -> bool:
    """Whether a tensor or context group has accelerators of different kinds: a layer would wait
    for the slower ones in each of its collectives, and shares cannot make up for that."""
    firsts = range(0, layout.world, layout.tp * layout.cp)
    return any(
        cluster.kind_of(first) is not cluster.kind_of(first + layout.tp * layout.cp - 1)
        for first in firsts
    )
