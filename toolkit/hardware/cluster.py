"""A cluster: nodes of equal accelerators, and the links between them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolkit.errors import PlanError
from toolkit.hardware.catalogue import GIGA, Gpu, accelerator, gpu
from toolkit.recipe.schema import ClusterSection, GpuSection

LinkKind = Literal["nvlink", "xgmi", "pcie", "infiniband", "roce", "ethernet", "shared"]
LINK_KINDS: tuple[LinkKind, ...] = (
    "nvlink", "xgmi", "pcie", "infiniband", "roce", "ethernet", "shared",
)  # fmt: skip
"""shared: processes of one machine that communicate through its memory."""


@dataclass(frozen=True)
class Link:
    """A link of one accelerator, in one direction."""

    bytes_per_s: float
    """Peak bandwidth of one accelerator's share of the link, each way."""
    kind: LinkKind = "infiniband"
    """Decides which share of the peak collectives reach."""
    measured_bytes_per_s: float | None = None
    """Measured bandwidth of large collectives, if available."""


@dataclass(frozen=True)
class Cluster:
    """The hardware of a layout. Ranks fill a node before the next one."""

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
    host_memory_bytes_per_s: float
    """Memory bandwidth of one node's processors."""
    nvme_gib: float
    """Local disks of one node."""
    price_per_gpu_hour: float | None = None
    link_domain: int | None = None
    """Accelerators that `node_link` joins where it reaches across nodes (72 in a GB200
    NVL72 rack); None: those of one node."""
    memory_fraction: float = 1.0
    """Share of each accelerator's memory that layouts may need; `gpu.memory_gib` is this share
    of it."""

    def limited(self, memory_fraction: float) -> "Cluster":
        """The same cluster, with this share of each accelerator's memory."""
        memory_gib = self.gpu.memory_gib
        if memory_gib is None or memory_fraction == self.memory_fraction:
            return self
        gpu = replace(self.gpu, memory_gib=memory_gib * memory_fraction / self.memory_fraction)
        return replace(self, gpu=gpu, memory_fraction=memory_fraction)

    @property
    def gpus(self) -> int:
        """All accelerators."""
        return self.nodes * self.gpus_per_node

    @property
    def section(self) -> dict[str, Any]:
        """What a recipe's `cluster` section says of it."""
        name = self.gpu.like or self.gpu.name
        return {"nodes": self.nodes, "gpus_per_node": self.gpus_per_node, "gpu": name}

    @property
    def island(self) -> int:
        """Accelerators that reach each other over `node_link`."""
        return self.link_domain or self.gpus_per_node


@dataclass(frozen=True)
class _Machine:
    """The usual surroundings of an accelerator; bandwidths in GB/s, links' each way."""

    gpus_per_node: int
    node_link: LinkKind
    node_gb_per_s: float
    network: LinkKind
    network_gb_per_s: float
    """Of one accelerator."""
    host_memory_gib: float
    host_gb_per_s: float
    nvme_gb_per_s: float
    host_memory_gb_per_s: float
    nvme_gib: float
    link_domain: int | None = None


# NVLink and Infinity Fabric: the accelerators' data sheets print both directions together
# (V100 300, A100 600, H100 900, B200 1,800, MI300X 7 × 128 GB/s): half of that. Networks: one
# adapter per accelerator (DGX A100: HDR, 200 Gb/s; DGX H100, H200, B200 and GB200: NDR,
# 400 Gb/s; MI300X platforms: 400 GbE RoCE), four EDR (100 Gb/s) for eight V100 in DGX-1.
# PCIe x16: 16 GB/s (3.0), 32 (4.0), 64 (5.0); Grace's NVLink-C2C: 450. Host memory and disks:
# the DGX user guides (DGX-1 512 GB; A100, H100 and B200 2 TB and 8 disks) with 3.2 GB/s per
# PCIe 3 disk and 6.5 per PCIe 4 disk; a GB200 tray has two Grace of 480 GB. Host memory
# bandwidth by channels: two processors with 4 × DDR4-2400 (DGX-1), 8 × DDR4-3200 (A100),
# 8 × DDR5-4800 (H100); 512 GB/s per Grace. Disks: 8 × 3.84 TB (DGX
# A100, H100, B200), 4 × 1.92 TB (DGX-1), half of a DGX's per GB200 tray, rounded to 1,000 GiB.
_SXM_A100 = _Machine(8, "nvlink", 300, "infiniband", 25, 2048, 32, 52, 410, 28_000)
_SXM_H100 = _Machine(8, "nvlink", 450, "infiniband", 50, 2048, 64, 52, 614, 28_000)
_PCIE_A100 = _Machine(8, "pcie", 32, "infiniband", 12.5, 1024, 32, 13, 410, 7_000)
# Parts without an HGX board, as they are commonly built in: assumed, without NVLink bridges.
_PCIE_INFERENCE = _Machine(4, "pcie", 32, "ethernet", 3.125, 512, 32, 13, 410, 4_000)
_WORKSTATION = _Machine(2, "pcie", 32, "ethernet", 1.25, 128, 32, 6.5, 51, 1_000)
_MACHINES: Mapping[str, _Machine] = {
    "v100-32gb": _Machine(8, "nvlink", 150, "infiniband", 6.25, 512, 16, 13, 154, 7_000),
    "a100-40gb": _SXM_A100,
    "a100-80gb": _SXM_A100,
    "a100-40gb-pcie": _PCIE_A100,
    "a100-80gb-pcie": _PCIE_A100,
    "h100-80gb": _SXM_H100,
    "h100-96gb": _SXM_H100,
    "h100-80gb-pcie": _Machine(8, "pcie", 64, "infiniband", 25, 1024, 64, 26, 614, 7_000),
    "h200": _SXM_H100,
    "b200": _Machine(8, "nvlink", 900, "infiniband", 50, 2048, 64, 52, 614, 28_000),
    "gb200": _Machine(4, "nvlink", 900, "infiniband", 50, 960, 450, 26, 1024, 14_000, 72),
    "mi300x": _Machine(8, "xgmi", 448, "roce", 50, 2048, 64, 52, 614, 28_000),
    "b300": _Machine(8, "nvlink", 900, "infiniband", 100, 2048, 64, 52, 614, 28_000),
    "gh200": _Machine(1, "nvlink", 450, "infiniband", 50, 480, 450, 13, 512, 7_000),
    "h20": _SXM_H100,
    "l40s": _PCIE_INFERENCE,
    "l4": _PCIE_INFERENCE,
    "a10": _PCIE_INFERENCE,
    "a10g": _PCIE_INFERENCE,
    "t4": _Machine(4, "pcie", 16, "ethernet", 3.125, 256, 16, 6.4, 154, 1_000),
    "a6000": _WORKSTATION,
    "rtx3090": _WORKSTATION,
    "rtx4090": _WORKSTATION,
    "rtx5090": _Machine(2, "pcie", 64, "ethernet", 1.25, 128, 64, 6.5, 77, 1_000),
    # A host with two channels of DDR4, 10 Gb/s Ethernet and one disk.
    "cpu": _Machine(1, "shared", 5, "ethernet", 1.25, 64, 20, 3.2, 40, 500),
}


def link(kind: LinkKind, gb_per_s: float) -> Link:
    """A link of a kind."""
    return Link(gb_per_s * GIGA, kind)


def usual_gpus_per_node(name: str) -> int:
    """Accelerators of a node as vendors sell them. Raises PlanError for unknown names."""
    return _MACHINES[gpu(name).name].gpus_per_node


def default_cluster(nodes: int, gpus_per_node: int, name: str | GpuSection) -> Cluster:
    """A cluster of an accelerator with the links that usually come with it.

    Raises PlanError for an accelerator that the catalogue lacks.
    """
    device = accelerator(name)
    machine = _MACHINES[device.like or device.name]
    return Cluster(
        name=f"{nodes}x{gpus_per_node}x{device.name}",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=device,
        node_link=link(machine.node_link, machine.node_gb_per_s),
        network=link(machine.network, machine.network_gb_per_s),
        host_memory_gib=machine.host_memory_gib,
        host_link_bytes_per_s=machine.host_gb_per_s * GIGA,
        nvme_bytes_per_s=machine.nvme_gb_per_s * GIGA,
        host_memory_bytes_per_s=machine.host_memory_gb_per_s * GIGA,
        nvme_gib=machine.nvme_gib,
        link_domain=machine.link_domain,
    )


def usual_cluster(where: ClusterSection) -> Cluster:
    """The cluster of a recipe's section, with the usual links of its accelerators.

    Raises PlanError for an accelerator that the catalogue lacks.
    """
    return default_cluster(where.nodes, where.gpus_per_node, where.gpu)


def parse_cluster(text: str) -> Cluster:
    """The cluster of a short form: `4x8xh100-80gb` is 4 nodes of 8; `8xh200` one node of 8.

    Raises PlanError naming what is wrong with the text.
    """
    if "+" in text:
        raise PlanError(
            f"--cluster: found {text[:80]!r}; groups of different GPUs were removed",
            fix="plan for machines of one kind, e.g. `--cluster 4x8xh100-80gb`",
        )
    counted = r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,4})x([a-z].*)"
    match = re.fullmatch(counted, text.lower(), re.ASCII)
    if match is None:
        raise PlanError(
            f"--cluster: found {text[:80]!r}; allowed: NODESxGPUSxNAME, or a YAML file",
            fix="for example `--cluster 4x8xh100-80gb`",
        )
    return default_cluster(int(match[1] or 1), int(match[2]), match[3])
