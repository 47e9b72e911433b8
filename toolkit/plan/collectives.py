"""Time of collectives by algorithm, message size, link and topology.

Ranks are placed as `Layout.data_rank` says: tensor fastest, then context, data, pipeline.
"""

from dataclasses import dataclass

from toolkit.hardware.cluster import Cluster
from toolkit.plan.efficiency import Efficiency


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, and what joins them."""

    size: int
    islands: int
    """Nodes (NVLink domains) that it spreads over."""
    bytes_per_s: float
    """What one member sends in a ring, at most."""
    latency_s: float
    """Of one step of the ring, its slowest link."""
    local_latency_s: float

    def all_gather_s(self, total_bytes: float) -> float:
        """Every member ends up with `total_bytes`; reduce-scatter takes as long."""
        if self.size == 1:
            return 0.0
        near = (self.size - self.islands) * self.local_latency_s
        far = (self.islands - 1) * self.latency_s
        return total_bytes * (self.size - 1) / self.size / self.bytes_per_s + near + far

    def all_reduce_s(self, total_bytes: float) -> float:
        """Ring, or a tree where the message is so small that steps count more than bytes."""
        if self.size == 1:
            return 0.0
        ring = 2 * self.all_gather_s(total_bytes)
        depth = (self.islands - 1).bit_length()
        steps = depth * self.latency_s + (self.size // self.islands - 1) * self.local_latency_s
        return min(ring, 2 * total_bytes / self.bytes_per_s + 2 * steps)

    def all_to_all_s(self, total_bytes: float) -> float:
        """Every member sends `total_bytes`, an equal part to each member."""
        return self.all_gather_s(total_bytes)


def group(size: int, stride: int, cluster: Cluster, efficiency: Efficiency) -> Group:
    """`size` ranks that are `stride` ranks apart."""
    island = cluster.island
    near, far = cluster.node_link, cluster.network
    local = max(1, min(size, island // stride))
    islands = -(-size // local)
    near_rate = near.bytes_per_s * efficiency.link[near.kind]
    if islands == 1:
        return Group(size, 1, near_rate, near.latency_s, near.latency_s)
    # Every member brings its own share of the network: rings enter and leave a node at
    # `local` places at once.
    rate = local * far.bytes_per_s * efficiency.link[far.kind]
    if local > 1:
        rate = min(rate, near_rate)
    return Group(size, islands, rate, far.latency_s, near.latency_s)


def point_to_point_s(
    message: float, stride: int, cluster: Cluster, efficiency: Efficiency
) -> float:
    """One message to the rank `stride` further."""
    link = cluster.node_link if stride < cluster.island else cluster.network
    return message / (link.bytes_per_s * efficiency.link[link.kind]) + link.latency_s
