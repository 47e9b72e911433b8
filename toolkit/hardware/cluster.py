"""A cluster: nodes of equal accelerators, and the links between them."""

from dataclasses import dataclass

from toolkit.hardware.catalogue import Gpu


@dataclass(frozen=True)
class Link:
    """What one accelerator can send at a time, in one direction."""

    bytes_per_s: float
    """Peak bandwidth of one accelerator's share of the link, each way."""
    latency_s: float
    """Time until the first byte of a message arrives, software included."""


@dataclass(frozen=True)
class Cluster:
    """What a layout is placed on. Ranks fill a node before the next one."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    node_link: Link
    """Between accelerators of one node (NVLink, PCIe)."""
    network: Link
    """Between nodes: one accelerator's share of its node's network cards."""
    host_memory_gib: float
    """Of one node."""
    host_link_bytes_per_s: float
    """Between one accelerator and its host's memory (PCIe, C2C), each way."""
    nvme_bytes_per_s: float
    """Local disks of one node, reading or writing."""
    price_per_gpu_hour: float | None = None

    @property
    def gpus(self) -> int:
        """All accelerators."""
        return self.nodes * self.gpus_per_node
