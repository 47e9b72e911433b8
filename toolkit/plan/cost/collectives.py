"""Rates of collectives by link and topology.

Ranks are placed as `Layout.data_rank` says: tensor fastest, then context, data, pipeline.
Latencies are not counted.
"""

from dataclasses import dataclass
from functools import lru_cache

from toolkit.plan.cost.efficiency import Efficiency
from toolkit.plan.hardware.catalogue import Link
from toolkit.plan.hardware.cluster import Cluster


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

    def message_bytes_per_s(self, stride: int) -> float:
        """To the rank at distance `stride`."""
        return self.near_bytes_per_s if stride < self.island else self.far_bytes_per_s


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

    @property
    def exchange_bytes_per_s(self) -> float:
        """What a member sends to all others, an equal part to each, at the slower of both
        links."""
        if self.size == 1:
            return self.links.near_bytes_per_s
        near, far = 1 / self.islands - 1 / self.size, 1 - 1 / self.islands
        links = self.links
        return (near + far) / max(near / links.near_bytes_per_s, far / links.far_bytes_per_s)


@lru_cache(maxsize=64)
def network(cluster: Cluster, efficiency: Efficiency) -> Network:
    """The links of `cluster` at the rates of the table."""
    near, far = (_rate(link, efficiency) for link in (cluster.node_link, cluster.network))
    return Network(cluster.island, near, far)


def _rate(link: Link, efficiency: Efficiency) -> float:
    """Bytes per second that large collectives reach."""
    return link.measured_bytes_per_s or link.bytes_per_s * efficiency[f"link.{link.kind}"]
