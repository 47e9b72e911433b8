"""Shares of peak speeds that real programs reach: the only table of the time model's constants.

Everything else comes from a data sheet (`toolkit.plan.hardware`) or is counted from shapes
(`toolkit.plan.cost.operators`). A constant belongs to a device, a link, a kernel or an engine,
never to a model or to a source of measurements. `benchmarks/calibrate_planner.py` fits the
calibrated ones and prints how well they predict held-out sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.text.units import GIB


class Constant(NamedTuple):
    """A value and where it comes from."""

    value: float
    origin: str
    """`calibrated: SOURCES`, `assumed: why`, or a document."""
    prior: float | None = None
    """Prior value, used without measured steps. Calibration starts there."""
    spread: float = 0.0
    """Width of the prior: a standard deviation of the logarithm."""


_A100 = "calibrated: megatron_sc21, korthikanti, vtrain_multi, llm_foundry, torchtitan"
_H100 = "calibrated: dgxc_benchmarking, llm_foundry"
_FLASH_1 = "calibrated: llm_foundry (FlashAttention and its Triton port)"
_FLASH_2 = "calibrated: torchtitan (FlashAttention-2)"
_MEASURED = "measured: an H100 SXM, torch 2.11, benchmarks/results/h100-2026-11-26"
_CUDNN = "calibrated: dgxc_benchmarking (Transformer Engine with cuDNN)"

TABLE: Mapping[str, Constant] = {
    # Share of the peak of large matrix products: clocks under load, instruction overhead.
    "matmul": Constant(0.75, "assumed: accelerators without a row, as the calibrated ones"),
    # Priors: cuBLAS reaches 250 of 312 and 700 of 989 TFLOP/s.
    "matmul.a100-40gb": Constant(0.81, "calibrated: llm_foundry", 0.80, 0.1),
    "matmul.a100-40gb-pcie": Constant(0.68, "assumed: 250 W instead of 400 W"),
    "matmul.a100-80gb": Constant(0.89, _A100, 0.80, 0.1),
    "matmul.a100-80gb-pcie": Constant(0.75, "assumed: 300 W instead of 400 W"),
    "matmul.h100-80gb": Constant(0.75, _H100, 0.72, 0.1),
    "matmul.h100-96gb": Constant(0.57, "calibrated: torchtitan (500 W, not 700)", 0.60, 0.1),
    "matmul.h100-80gb-pcie": Constant(0.60, "assumed: 350 W, lower peak"),
    "matmul.h200": Constant(0.75, "assumed: as H100"),
    "matmul.b200": Constant(0.70, "assumed: nearly as H100"),
    "matmul.gb200": Constant(0.70, "assumed: nearly as H100"),
    "matmul.b300": Constant(0.70, "assumed: as B200"),
    "matmul.gh200": Constant(0.75, "assumed: as H100"),
    "matmul.l40s": Constant(0.60, "assumed: 350 W, as H100 PCIe"),
    "matmul.l4": Constant(0.45, "assumed: 72 W limit its clock"),
    "matmul.a6000": Constant(0.70, "assumed: 300 W"),
    "matmul.a10": Constant(0.55, "assumed: 150 W limit its clock"),
    "matmul.t4": Constant(0.36, "assumed: half of that, 70 W limit its clock"),
    "matmul.mi300x": Constant(0.55, "assumed: 750 W; hipBLASLt reaches less than cuBLAS"),
    "matmul.cpu": Constant(1.0, "assumed: `cpu.flops` is what is reached"),
    # Inner size at which half of that rate is reached.
    "matmul.half_k": Constant(700, "calibrated: all sources", 128, 0.5),
    "matmul.half_k.cpu": Constant(
        8, "measured: one core of the development machine; 0.8 of the rate at 32"
    ),
    "matmul.fp8": Constant(0.85, "assumed: share of the 16-bit share; power limits both"),
    # Share of the peak memory bandwidth that streaming kernels reach; copies reach 0.85.
    "memory": Constant(0.61, "calibrated: all sources", 0.80, 0.1),
    # Fused attention: share of the peak of the products that the mask leaves, heads of 128.
    # Priors: FlashAttention (arXiv:2205.14135) and FlashAttention-2 (arXiv:2307.08691),
    # about 110 and 170 of 312 TFLOP/s on A100, 190 and 340 of 989 on H100; cuDNN about 550.
    "attention.volta": Constant(0.40, "assumed: no FlashAttention-2 for Volta"),
    "attention.turing": Constant(0.40, "assumed: as Volta"),
    "attention.ada": Constant(0.295, "assumed: as Ampere"),
    "attention.ampere": Constant(0.295, _FLASH_2, 0.55, 0.2),
    "attention.hopper": Constant(0.34, _FLASH_2, 0.35, 0.2),
    "attention.hopper.te": Constant(0.60, _CUDNN, 0.55, 0.2),
    "attention.hopper.cudnn": Constant(0.62, _MEASURED),
    "attention.hopper.mask": Constant(0.15, _MEASURED),
    "attention.ampere.mask": Constant(
        0.29, "assumed: Hopper's share of its first FlashAttention"
    ),
    "attention.blackwell": Constant(0.34, "assumed: as Hopper"),
    "attention.blackwell.te": Constant(0.55, "assumed: less than Hopper's share"),
    "attention.blackwell.cudnn": Constant(0.43, "assumed: as Hopper's, of Blackwell's"),
    "attention.cdna3": Constant(0.30, "assumed: FlashAttention-2 on MI300X"),
    "attention.cpu": Constant(0.35, "measured: PyTorch on one core of the development machine"),
    "attention.ampere.1": Constant(0.347, _FLASH_1, 0.36, 0.2),
    "attention.hopper.1": Constant(0.187, _FLASH_1, 0.20, 0.2),
    # FlashAttention-2 paper, figures 4 to 6: half of the rate at about 500 tokens; the
    # backward pass at 0.8 to 0.9 of the forward rate.
    "attention.half_sequence": Constant(500, "FlashAttention-2 paper, figure 5"),
    "attention.half_sequence.cpu": Constant(
        16, "measured: one core of the development machine"
    ),
    "attention.backward": Constant(0.85, "FlashAttention-2 paper, figures 5 and 6"),
    # Share of a link's peak that large collectives reach (NCCL's bus bandwidth).
    "link.nvlink": Constant(0.78, "NCCL tests: 235 of 300 GB/s on A100, 360 of 450 on H100"),
    "link.xgmi": Constant(0.70, "RCCL tests: 310 of 448 GB/s on MI300X"),
    "link.pcie": Constant(0.65, "assumed: NCCL through host bridges"),
    "link.infiniband": Constant(0.85, "NCCL tests: 21 of 25 GB/s per HDR adapter"),
    "link.roce": Constant(0.80, "assumed: nearly as InfiniBand"),
    "link.ethernet": Constant(0.70, "assumed: TCP"),
    "link.shared": Constant(0.50, "assumed: gloo on one host"),
    "link.host": Constant(0.80, "assumed: pinned copies over PCIe"),
    "link.nvme": Constant(0.80, "assumed: large sequential reads and writes"),
    # Seconds lost per second of traffic that overlaps with computation: NCCL's kernels take
    # multiprocessors and memory bandwidth, and units wait for each other.
    "overlap.megatron": Constant(0.31, "calibrated: dgxc_benchmarking", 0.3, 0.4),
    "overlap.fsdp": Constant(0.68, "calibrated: llm_foundry, torchtitan", 0.5, 0.4),
    "overlap.deepspeed": Constant(0.68, "assumed: as FSDP"),
    "overlap.ddp": Constant(0.31, "assumed: as Megatron"),
    "overlap.host": Constant(0.5, "assumed: copies take no multiprocessors, but units wait"),
    "kernel.gap_s": Constant(2e-6, "assumed: between two kernels of a stream"),
    # On a CPU it is the time to start an operator.
    "kernel.gap_s.cpu": Constant(12e-6, "measured: a transformers Llama layer on 8 tokens"),
    # Standard deviation of the nodes' speed.
    "straggler": Constant(0.0044, "calibrated: all sources with several nodes", 0.005, 0.5),
    # Memory that PyTorch's allocator holds beyond what is allocated at the peak, as a share of
    # it: blocks are split, rounded up and not always reused. While there is room it reserves
    # more.
    "allocator.reserve": Constant(
        0.07, "measured: torchtitan's reserved peaks with torch.compile on 8 and 128 H100"
    ),
    # Outside of the allocator: CUDA's context with its kernels, and each of NCCL's
    # communicators, before NCCL 2.22 allocated their buffers lazily.
    "device.cuda_bytes": Constant(0.7 * GIB, "assumed: no run has measured it yet"),
    "device.communicator_bytes": Constant(
        0.4 * GIB, "assumed: 544 to 688 MB for one of four A100 (NVIDIA/nccl#964)"
    ),
    "host.memory": Constant(0.7, "assumed: CPU Adam's share of the host's memory bandwidth"),
    # An unknown CPU: `dmt doctor --calibrate` measures it.
    "cpu.flops": Constant(1e11, "assumed: a few cores with AVX2, fp32"),
    "cpu.bytes_per_s": Constant(2e10, "assumed: two channels of DDR4"),
}


@dataclass(frozen=True, eq=False)
class Efficiency:
    """The values of the table, or replacements during calibration."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def matmul(self, gpu: str) -> float:
        """The share of an accelerator of the catalogue."""
        return self.values.get(f"matmul.{gpu}", self.values["matmul"])


DEFAULT = Efficiency({name: constant.value for name, constant in TABLE.items()})
