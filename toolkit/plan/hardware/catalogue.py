"""Accelerators by name: memory, peak speed, and the machines that are usually built of them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import PlanError
from toolkit.text.suggest import did_you_mean

GIGA = 1e9
TERA = 1e12

Generation = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna3", "cpu"]
"""NVIDIA's in the order of their years."""


LinkKind = Literal["nvlink", "xgmi", "pcie", "infiniband", "roce", "ethernet", "shared"]
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


def link(kind: LinkKind, gb_per_s: float) -> Link:
    """A link of a kind."""
    return Link(gb_per_s * GIGA, kind)


@dataclass(frozen=True)
class Surroundings:
    """The node of an accelerator, and its links."""

    gpus_per_node: int
    node_link: Link
    """Between accelerators of one node (NVLink, PCIe)."""
    network: Link
    """Between nodes: one accelerator's share of its node's network cards."""
    host_memory_gib: float
    """Host memory of one node."""
    host_link_bytes_per_s: float
    """Between one accelerator and its host's memory (PCIe, C2C), each way."""
    nvme_bytes_per_s: float
    """Local disks of one node, reading or writing."""
    host_memory_bytes_per_s: float
    """Memory bandwidth of one node's processors."""
    nvme_gib: float
    """Local disks of one node."""
    link_domain: int | None = None
    """Accelerators that `node_link` joins where it reaches across nodes (72 in a GB200
    NVL72 rack). None: those of one node."""


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Peaks are dense (no structured sparsity), in FLOP/s. None where
    the device has no such unit (or, for `cpu`, where no figure is stated)."""

    name: str
    memory_gib: float | None
    """What the driver leaves of the marketed capacity: the total that CUDA and ROCm report
    (`torch.cuda.get_device_properties`), the least that is reported for the part."""
    fp32: float | None = None
    """fp32 inputs, multiplied exactly (no TF32)."""
    tf32: float | None = None
    """fp32 inputs, rounded to TF32 in the tensor cores. Off unless the user asks for it."""
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    memory_bytes_per_s: float | None = None
    """Peak bandwidth of the device's own memory."""
    generation: Generation = "cpu"
    """Decides which attention kernels there are."""
    like: str | None = None
    """The catalogue's accelerator whose shares of a peak hold for this one too, where it is a
    user's own. None: its own."""
    measured: "Gpu | None" = None
    """Speeds that were measured on this machine, in the fields of the peaks."""
    usual: Surroundings | None = None
    """What it is usually built into."""

    def peak_flops(self, precision: str) -> float | None:
        """Peak dense FLOP/s for a recipe's `training.precision`. None when there is none.

        `precision`: fp32, bf16, fp16 or fp8. Another name is a KeyError.
        """
        return {"fp32": self.fp32, "fp16": self.fp16, "bf16": self.bf16, "fp8": self.fp8}[
            precision
        ]


# The usual machines. NVLink and Infinity Fabric: data sheets print both directions together
# (V100 300, A100 600, H100 900, B200 1,800, MI300X 7 × 128 GB/s): half of that. Networks: one
# adapter per accelerator (DGX A100: HDR, 200 Gb/s; DGX H100, H200, B200 and GB200: NDR,
# 400 Gb/s; MI300X: 400 GbE RoCE), four EDR (100 Gb/s) for eight V100 in DGX-1. PCIe x16:
# 16 GB/s (3.0), 32 (4.0), 64 (5.0); Grace's NVLink-C2C: 450. Host memory and disks: the DGX
# user guides (DGX-1 512 GB and 4 × 1.92 TB; A100, H100 and B200 2 TB and 8 × 3.84 TB; half of
# a DGX's per GB200 tray, which has two Grace of 480 GB), with 3.2 GB/s per PCIe 3 disk and 6.5
# per PCIe 4 disk. Host memory bandwidth by channels: two processors with 4 × DDR4-2400 (DGX-1),
# 8 × DDR4-3200 (A100), 8 × DDR5-4800 (H100); 512 GB/s per Grace.
_NVLINK_2, _NVLINK_3, _NVLINK_4, _NVLINK_5 = (link("nvlink", x) for x in (150, 300, 450, 900))
_PCIE_3, _PCIE_4, _PCIE_5 = (link("pcie", x) for x in (16, 32, 64))
_EDR, _HDR, _NDR, _XDR = (link("infiniband", x) for x in (12.5, 25, 50, 100))
_GBE_10, _GBE_25 = (link("ethernet", x) for x in (1.25, 3.125))
_DGX_1 = Surroundings(8, _NVLINK_2, link("infiniband", 6.25), 512, 16e9, 13e9, 154e9, 7_000)
_DGX_A100 = Surroundings(8, _NVLINK_3, _HDR, 2048, 32e9, 52e9, 410e9, 28_000)
_DGX_H100 = Surroundings(8, _NVLINK_4, _NDR, 2048, 64e9, 52e9, 614e9, 28_000)
_DGX_B200 = Surroundings(8, _NVLINK_5, _NDR, 2048, 64e9, 52e9, 614e9, 28_000)
_DGX_B300 = Surroundings(8, _NVLINK_5, _XDR, 2048, 64e9, 52e9, 614e9, 28_000)
_NVL72 = Surroundings(4, _NVLINK_5, _NDR, 960, 450e9, 26e9, 1024e9, 14_000, 72)
_GRACE = Surroundings(1, _NVLINK_4, _NDR, 480, 450e9, 13e9, 512e9, 7_000)
_XGMI = Surroundings(8, link("xgmi", 448), link("roce", 50), 2048, 64e9, 52e9, 614e9, 28_000)
_PCIE_A100 = Surroundings(8, _PCIE_4, _EDR, 1024, 32e9, 13e9, 410e9, 7_000)
_PCIE_H100 = Surroundings(8, _PCIE_5, _HDR, 1024, 64e9, 26e9, 614e9, 7_000)
# Parts without an HGX board, as they are commonly built in: assumed, without NVLink bridges.
_INFERENCE = Surroundings(4, _PCIE_4, _GBE_25, 512, 32e9, 13e9, 410e9, 4_000)
_TURING = Surroundings(4, _PCIE_3, _GBE_25, 256, 16e9, 6.4e9, 154e9, 1_000)
_DESKTOP = Surroundings(2, _PCIE_4, _GBE_10, 128, 32e9, 6.5e9, 51e9, 1_000)
_DESKTOP_5 = Surroundings(2, _PCIE_5, _GBE_10, 128, 64e9, 6.5e9, 77e9, 1_000)
# A host with two channels of DDR4, 10 Gb/s Ethernet and one disk.
_HOST = Surroundings(1, link("shared", 5), _GBE_10, 64, 20e9, 3.2e9, 40e9, 500)

_A100 = (19.5, 156.0, 312.0)
# H100 and H200 sheets print figures with 2:4 sparsity: half of 989, 1,979 and 3,958.
_H100 = (67.0, 494.5, 989.5, 1979.0)
_H100_PCIE = (51.0, 378.0, 756.5, 1513.0)

# Name, what drivers call it (a pattern, in lowercase), generation, GiB, GB/s, machine; TFLOP/s
# of fp32, TF32, 16 bits and fp8: Volta and Turing have neither bf16 nor TF32. Figures of the
# vendors' data sheets; of GeForce and RTX cards the white papers' (appendix A), whose tensor
# cores' rate is that with fp32 sums, which training needs.
_ROWS: tuple[
    tuple[str, str, Generation, float, float, Surroundings, tuple[float | None, ...]], ...
] = (
    ("v100-32gb", r"v100-sxm.*32gb", "volta", 31.7, 900, _DGX_1, (15.7, None, 125.0)),
    ("a100-40gb", r"a100-sxm.*40gb", "ampere", 39.4, 1555, _DGX_A100, _A100),
    ("a100-40gb-pcie", "a100-pcie-40gb", "ampere", 39.4, 1555, _PCIE_A100, _A100),
    ("a100-80gb", r"a100-sxm.*80gb", "ampere", 79.1, 2039, _DGX_A100, _A100),
    ("a100-80gb-pcie", r"a100.(80gb pcie|pcie-80gb)", "ampere", 79.1, 1935, _PCIE_A100, _A100),
    ("h100-80gb", "h100 80gb hbm3", "hopper", 79.1, 3350, _DGX_H100, _H100),
    # An H100 SXM with 96 GB of HBM2e at 500 W, as torchtitan's benchmarks describe theirs. No
    # data sheet is public: peaks of the SXM part, which torchtitan computes its MFU with;
    # memory as six stacks of HBM2e; the H100 PCIe has five (2,039 GB/s).
    ("h100-96gb", r"h100.*96gb", "hopper", 95.0, 2447, _DGX_H100, _H100),
    ("h100-80gb-pcie", "h100 pcie", "hopper", 79.1, 2000, _PCIE_H100, _H100_PCIE),
    ("h200", r"\bh200", "hopper", 139.7, 4800, _DGX_H100, _H100),
    # HGX B200 and GB200 NVL72: figures with sparsity, halved.
    ("b200", r"\bb200", "blackwell", 178.3, 7700, _DGX_B200, (75.0, 1100.0, 2250.0, 4500.0)),
    ("gb200", r"\bgb200", "blackwell", 184.3, 8000, _NVL72, (80.0, 1250.0, 2500.0, 5000.0)),
    ("b300", r"\bb300", "blackwell", 267.6, 8000, _DGX_B300, (75.0, 1125.0, 2250.0, 4500.0)),
    ("gh200", r"\bgh200 480gb", "hopper", 94.5, 4000, _GRACE, _H100),
    ("h20", r"\bh20\b", "hopper", 95.0, 4000, _DGX_H100, (44.0, 74.0, 148.0, 296.0)),
    ("l40s", r"\bl40s", "ada", 44.4, 864, _INFERENCE, (91.6, 183.0, 362.05, 733.0)),
    ("l4", r"\bl4\b", "ada", 22.0, 300, _INFERENCE, (30.3, 60.0, 121.0, 242.5)),
    ("rtx4090", r"rtx 4090$", "ada", 23.5, 1008, _DESKTOP, (82.6, 82.6, 165.2, 330.3)),
    ("rtx5090", r"rtx 5090$", "blackwell", 31.3, 1792, _DESKTOP_5, (104.8, 104.8, 209.5, 419)),
    ("rtx3090", r"rtx 3090$", "ampere", 23.6, 936, _DESKTOP, (35.6, 35.6, 71.0)),
    ("a6000", "rtx a6000", "ampere", 47.4, 768, _DESKTOP, (38.7, 77.4, 154.8)),
    ("a10", r"\ba10\b", "ampere", 21.9, 600, _INFERENCE, (31.2, 62.5, 125.0)),
    ("a10g", r"\ba10g", "ampere", 21.9, 600, _INFERENCE, (35.0, 35.0, 70.0)),
    ("t4", r"\bt4\b", "turing", 14.5, 320, _TURING, (8.1, None, 65.0)),
    ("mi300x", "mi300x", "cdna3", 191.6, 5300, _XGMI, (163.4, 653.7, 1307.4, 2614.9)),
)


def _listed() -> Iterator[Gpu]:
    for name, _, generation, memory_gib, gb_per_s, usual, peaks in _ROWS:
        fp32, tf32, half, fp8 = (
            None if peak is None else peak * TERA for peak in (*peaks, None)[:4]
        )
        bf16 = None if generation in ("volta", "turing") else half
        speed = gb_per_s * GIGA
        yield Gpu(name, memory_gib, fp32, tf32, half, bf16, fp8, speed, generation, usual=usual)
    # The host's processor: memory and speed depend on the machine.
    yield Gpu("cpu", None, usual=_HOST)


GPUS: Mapping[str, Gpu] = {entry.name: entry for entry in _listed()}


def name_of_device(device: str) -> str:
    """The catalogue's name of a device that calls itself e.g. `NVIDIA A100-SXM4-40GB`. The
    device's own where the catalogue has none like it."""
    return next((row[0] for row in _ROWS if re.search(row[1], device.lower())), device)


_SIMILAR = 0.75
"""Similarity of names that differ by about two characters."""
_ALIASES = {"v100": "v100-32gb", "a100": "a100-80gb", "h100": "h100-80gb"}
"""Names of products that are sold with several memories, and the usual one."""


def accelerator(name: str) -> Gpu:
    """Look one up by its catalogue name, in any case (`H100-80GB`, `h100`).

    Raises PlanError naming the known accelerators when there is none of that name.
    """
    found = GPUS.get(_ALIASES.get(name.lower(), name.lower()))
    if found is None:
        device = name_of_device(name[:80]).lower()  # of a name as nvidia-smi prints it
        similar = did_you_mean(device, GPUS, "choose one of these,", _SIMILAR)
        raise PlanError(
            f"cluster.gpu: found {name[:80]!r}; known: {', '.join(GPUS)}",
            fix=f"{similar} or describe yours by the closest in a cluster file: "
            "`gpu: {like: h100-80gb, memory_gib: 94}` (docs/cluster.md)",
        )
    return found
