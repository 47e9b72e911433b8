"""How much of a peak real programs reach: the one table of the time model's constants.

Everything else is a data sheet (`toolkit.hardware`) or is counted from shapes
(`toolkit.plan.operators`). A constant belongs to a device, a link, a kernel or an engine,
never to a model or to a source of measurements. `benchmarks/calibrate_planner.py` fits those
whose origin is CALIBRATED and prints how well they predict sources that they have not seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

CALIBRATED = "calibrated"
ASSUMED = "assumed"


class Constant(NamedTuple):
    """A value and where it comes from."""

    value: float
    origin: str
    """Begins with CALIBRATED or ASSUMED, or names a document."""
    spread: float = 0.0
    """How far calibration lets the value go: a standard deviation of its logarithm."""


_A100 = "calibrated: megatron_sc21, korthikanti, vtrain_multi, llm_foundry, torchtitan"
_H100 = "calibrated: dgxc_benchmarking, llm_foundry"
_FLASH_1 = "calibrated: llm-foundry (FlashAttention and its Triton port)"

TABLE: Mapping[str, Constant] = {
    # Share of the peak of large matrix products: clocks under load, instruction overhead.
    "matmul.v100-32gb": Constant(0.80, "assumed: as A100"),
    "matmul.a100-40gb": Constant(0.78, "calibrated: llm-foundry", 0.1),
    "matmul.a100-40gb-pcie": Constant(0.70, "assumed: 250 W instead of 400 W"),
    "matmul.a100-80gb": Constant(0.82, _A100, 0.1),
    "matmul.a100-80gb-pcie": Constant(0.74, "assumed: 300 W instead of 400 W"),
    "matmul.h100-80gb": Constant(0.72, _H100, 0.05),
    "matmul.h100-96gb": Constant(0.57, "calibrated: torchtitan (500 W instead of 700 W)", 0.1),
    "matmul.h100-80gb-pcie": Constant(0.60, "assumed: 350 W, lower peak"),
    "matmul.h200": Constant(0.72, "assumed: as H100"),
    "matmul.b200": Constant(0.70, "assumed: as H100"),
    "matmul.gb200": Constant(0.70, "assumed: as H100"),
    "matmul.mi300x": Constant(0.55, "assumed: 750 W; hipBLASLt reaches less than cuBLAS"),
    "matmul.cpu": Constant(1.0, "assumed: `cpu.flops` is what is reached"),
    "matmul.half_k": Constant(
        200, "calibrated: inner size at which half of the rate is reached, all sources", 0.5
    ),
    "matmul.fp8": Constant(0.85, "assumed: share of the 16-bit share; power limits both"),
    # Quality of a tile relative to the largest one (CUTLASS's profiler on A100).
    "tile.256": Constant(1.0, "assumed: 256 × 128"),
    "tile.128": Constant(0.92, "assumed: 128 × 128"),
    "tile.64": Constant(0.75, "assumed: 128 × 64"),
    # Share of the peak memory bandwidth that streaming kernels reach.
    "memory": Constant(
        0.75, "calibrated: all sources; STREAM-like kernels reach 0.8–0.9", 0.15
    ),
    # Fused attention: share of the peak of the products that the mask leaves, head size 128.
    "attention.volta": Constant(0.40, "assumed: no FlashAttention-2 for Volta"),
    "attention.ampere": Constant(
        0.55, "calibrated: torchtitan, Megatron golden values (FlashAttention-2)", 0.2
    ),
    "attention.hopper": Constant(0.33, "calibrated: torchtitan (FlashAttention-2)", 0.2),
    "attention.hopper.te": Constant(
        0.55, "calibrated: dgxc-benchmarking (Transformer Engine with cuDNN)", 0.2
    ),
    "attention.blackwell": Constant(0.33, "assumed: as Hopper"),
    "attention.blackwell.te": Constant(0.50, "assumed: as Hopper"),
    "attention.cdna3": Constant(0.30, "assumed"),
    "attention.cpu": Constant(0.50, "assumed"),
    "attention.ampere.1": Constant(0.40, _FLASH_1, 0.2),
    "attention.hopper.1": Constant(0.20, _FLASH_1, 0.2),
    "attention.half_sequence": Constant(
        450, "calibrated: tokens at which half of the rate is reached, all sources", 0.3
    ),
    "attention.backward": Constant(
        0.85, "calibrated: rate of the backward pass relative to forward, all sources", 0.1
    ),
    "attention.head_64": Constant(
        0.92, "calibrated: rate with heads of 64 relative to 128, llm-foundry", 0.1
    ),
    # Share of a link's peak that large collectives reach (NCCL's bus bandwidth).
    "link.nvlink": Constant(0.78, "NCCL tests: 235 of 300 GB/s on A100, 360 of 450 on H100"),
    "link.xgmi": Constant(0.70, "RCCL tests: 310 of 448 GB/s on MI300X"),
    "link.pcie": Constant(0.65, "assumed: NCCL through host bridges"),
    "link.infiniband": Constant(0.85, "NCCL tests: 21 of 25 GB/s per HDR adapter"),
    "link.roce": Constant(0.80, "assumed"),
    "link.ethernet": Constant(0.70, "assumed"),
    "link.shared": Constant(0.50, "assumed"),
    "link.host": Constant(0.80, "assumed: pinned copies over PCIe"),
    "link.nvme": Constant(0.80, "assumed: large sequential reads and writes"),
    # Seconds lost per second of traffic that runs beside computation: NCCL's kernels take
    # multiprocessors and memory bandwidth, and units wait for each other.
    "overlap.megatron": Constant(
        0.3, "calibrated: dgxc-benchmarking, Megatron golden values", 0.4
    ),
    "overlap.fsdp": Constant(0.8, "calibrated: llm-foundry, torchtitan", 0.3),
    "overlap.deepspeed": Constant(0.8, "assumed: as FSDP"),
    "overlap.ddp": Constant(0.3, "assumed: as megatron"),
    "overlap.tensor": Constant(
        0.6, "calibrated: dgxc-benchmarking, torchtitan (what chunked overlap leaves)", 0.3
    ),
    # Host and clock.
    "kernel.launch_s": Constant(6e-6, "assumed: one PyTorch operator on the host"),
    "kernel.gap_s": Constant(2e-6, "assumed: between two kernels of a stream"),
    "step.host_s": Constant(5e-3, "assumed: data, clipping, schedule, logging"),
    "straggler": Constant(
        0.007, "calibrated: spread of the nodes' speed, all sources with many nodes", 0.5
    ),
    "host.memory": Constant(0.7, "assumed: CPU Adam's share of the host's memory bandwidth"),
    # A CPU about which nothing is known: `dmt doctor --calibrate` measures it.
    "cpu.flops": Constant(1e11, "assumed: a few cores with AVX2, fp32"),
    "cpu.bytes_per_s": Constant(2e10, "assumed: two channels of DDR4"),
}


@dataclass(frozen=True, eq=False)
class Efficiency:
    """The values of the table, or others in their place while they are calibrated."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]


DEFAULT = Efficiency({name: constant.value for name, constant in TABLE.items()})
