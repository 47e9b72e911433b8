"""Time of collectives by algorithm, message size, link and topology.

Ranks are placed as `Layout.data_rank` says: tensor fastest, then context, data, pipeline.
A ring moves (n - 1)/n of the data (Thakur et al. 2005); latencies are not counted.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from toolkit.hardware.cluster import Cluster, Link
from toolkit.plan.cost.efficiency import Efficiency

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, eq=False)
class Network:
    """The links of a cluster at the rates that collectives reach, of one member each way."""

    island: int
    """Ranks that reach each other without the network between nodes."""
    near_bytes_per_s: float
    """Within an island; far: between them."""
    far_bytes_per_s: float

    @lru_cache(maxsize=4096)  # noqa: B019  there is one network per cluster
    def group(self, size: int, stride: int) -> "Group":
        """`size` ranks that are `stride` ranks apart."""
        together = max(1, min(size, self.island // stride))
        return Group(size, -(-size // together), self)

    def message_s(self, message_bytes: float, stride: int) -> float:
        """One message to the rank at distance `stride`."""
        near = stride < self.island
        return message_bytes / (self.near_bytes_per_s if near else self.far_bytes_per_s)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate."""

    size: int
    islands: int
    """Nodes (or NVLink domains) that it spreads over."""
    links: Network

    @property
    def bytes_per_s(self) -> float:
        """The link between neighbours of a ring.

        A ring over several islands uses all members' adapters at once: NCCL builds as many
        rings as there are adapters, each with another member at the border.
        """
        if self.islands == 1:
            return self.links.near_bytes_per_s
        rate = self.size / self.islands * self.links.far_bytes_per_s
        return min(rate, self.links.near_bytes_per_s) if self.size > self.islands else rate

    def all_gather_s(self, total_bytes: float) -> float:
        """Every member ends up with `total_bytes`, of which it had 1/size."""
        return total_bytes * (self.size - 1) / self.size / self.bytes_per_s

    def reduce_scatter_s(self, total_bytes: float) -> float:
        """Every member ends up with the sum of 1/size of `total_bytes`: an all-gather back."""
        return self.all_gather_s(total_bytes)

    def all_reduce_s(self, total_bytes: float) -> float:
        """A reduce-scatter and an all-gather."""
        return 2 * self.all_gather_s(total_bytes)

    @property
    def near_share(self) -> float:
        """Of what a member sends to all members, the part for others of its island."""
        return 1 / self.islands - 1 / self.size

    @property
    def far_share(self) -> float:
        """The part for other islands."""
        return (self.islands - 1) / self.islands

    def all_to_all_s(self, own_bytes: float) -> float:
        """Every member sends an equal part of its `own_bytes` to each member."""
        if self.size == 1:
            return 0.0
        near = own_bytes * self.near_share / self.links.near_bytes_per_s
        far = own_bytes * self.far_share / self.links.far_bytes_per_s
        return max(near, far)


class Collectives(NamedTuple):
    """The same collective `times` times."""

    kind: CollectiveKind
    group: Group
    nbytes: float
    """Of the whole tensor, each time; of all_to_all, of a member's own part."""
    times: float = 1

    @property
    def seconds(self) -> float:
        """Of all of them."""
        once: float = getattr(self.group, f"{self.kind}_s")(self.nbytes)
        return self.times * once


@lru_cache(maxsize=64)
def network(cluster: Cluster, efficiency: Efficiency) -> Network:
    """The links of `cluster` at the rates of the table."""
    near, far = cluster.node_link, cluster.network
    return Network(
        cluster.island,
        _rate(near, efficiency),
        _rate(far, efficiency),
    )


def _rate(link: Link, efficiency: Efficiency) -> float:
    """Bytes per second that large collectives reach."""
    return link.measured_bytes_per_s or link.bytes_per_s * efficiency[f"link.{link.kind}"]
