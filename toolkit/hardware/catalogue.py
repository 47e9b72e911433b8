"""Accelerators by name: memory and peak speed, from the vendors' data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from toolkit.errors import PlanError

GIGA = 1e9
TERA = 1e12

Generation = Literal["volta", "ampere", "hopper", "blackwell", "cdna3", "cpu"]


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Peaks are dense (no structured sparsity), in FLOP/s; None where
    the device has no such unit (or, for `cpu`, where no figure is stated)."""

    name: str
    memory_gib: float | None
    """Marketed capacity. Vendors print "GB", but the memory is built in powers of two, so
    the number is read as GiB (2**30 bytes); the driver keeps 0 to 2% of it for itself."""
    fp32: float | None = None
    """fp32 inputs, multiplied exactly (no TF32)."""
    tf32: float | None = None
    """fp32 inputs, rounded to TF32 in the tensor cores; off unless the user asks for it."""
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    memory_bytes_per_s: float | None = None
    """Peak bandwidth of the device's own memory."""
    multiprocessors: int = 1
    """Units that each compute a tile of a matrix product at a time (SMs, CUs)."""
    generation: Generation = "cpu"
    """Decides which attention kernels there are."""
    like: str | None = None
    """The catalogue's accelerator whose shares of a peak hold for this one too, where it is a
    user's own; None: its own."""
    measured: "Gpu | None" = None
    """Speeds that were measured on this machine, in the fields of the peaks."""

    def peak_flops(self, precision: str) -> float | None:
        """Peak dense FLOP/s for a recipe's `training.precision`; None when there is none.

        `precision`: fp32, bf16, fp16 or fp8; another name is a KeyError.
        """
        return {"fp32": self.fp32, "fp16": self.fp16, "bf16": self.bf16, "fp8": self.fp8}[
            precision
        ]


def _gpu(
    name: str,
    generation: Generation,
    memory_gib: float,
    memory_gb_per_s: float,
    multiprocessors: int,
    **peaks_tera: float,
) -> Gpu:
    peaks = {unit: peak * TERA for unit, peak in peaks_tera.items()}
    return Gpu(
        name,
        memory_gib,
        fp32=peaks["fp32"],
        tf32=peaks.get("tf32"),
        fp16=peaks["fp16"],
        bf16=peaks.get("bf16"),
        fp8=peaks.get("fp8"),
        memory_bytes_per_s=memory_gb_per_s * GIGA,
        multiprocessors=multiprocessors,
        generation=generation,
    )


_A100 = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
# H100 and H200 sheets print figures with 2:4 sparsity: half of 989, 1,979 and 3,958.
_H100_SXM = {"fp32": 67.0, "tf32": 494.5, "fp16": 989.5, "bf16": 989.5, "fp8": 1979.0}

# Numbers of multiprocessors: the vendors' architecture white papers (V100 80, A100 108,
# H100 SXM 132 and PCIe 114, Blackwell 148; MI300X 304 compute units).
_GPUS = (
    # NVIDIA V100 data sheet (SXM2): 15.7 TFLOPS single, 125 TFLOPS tensor, 32 GB, 900 GB/s.
    # Volta has neither bf16 nor TF32.
    _gpu("v100-32gb", "volta", 32, 900, 80, fp32=15.7, fp16=125.0),
    # NVIDIA A100 data sheets, 40 GB and 80 GB; PCIe and SXM have the same peaks, memory of
    # 1,555 (40 GB), 1,935 (80 GB PCIe) and 2,039 GB/s (80 GB SXM).
    _gpu("a100-40gb", "ampere", 40, 1555, 108, **_A100),
    _gpu("a100-40gb-pcie", "ampere", 40, 1555, 108, **_A100),
    _gpu("a100-80gb", "ampere", 80, 2039, 108, **_A100),
    _gpu("a100-80gb-pcie", "ampere", 80, 1935, 108, **_A100),
    # NVIDIA H100 data sheet, SXM column: 3.35 TB/s.
    _gpu("h100-80gb", "hopper", 80, 3350, 132, **_H100_SXM),
    # An H100 SXM with 96 GB of HBM2e at 500 W, as torchtitan's benchmarks describe theirs. No
    # data sheet is public: peaks of the SXM part, which torchtitan computes its MFU with;
    # memory as six stacks of the HBM2e of which the H100 PCIe has five (2,039 GB/s).
    _gpu("h100-96gb", "hopper", 96, 2447, 132, **_H100_SXM),
    # NVIDIA H100 data sheet, PCIe column (51; 756, 1,513 and 3,026 with sparsity), 2.0 TB/s.
    _gpu(
        "h100-80gb-pcie", "hopper", 80, 2000, 114,
        fp32=51.0, tf32=378.0, fp16=756.5, bf16=756.5, fp8=1513.0,
    ),
    # NVIDIA H200 data sheet, SXM column: an H100 with 141 GB at 4.8 TB/s.
    _gpu("h200", "hopper", 141, 4800, 132, **_H100_SXM),
    # NVIDIA HGX B200 (Blackwell data sheet), per GPU: 75; 2,200, 4,500 and 9,000 with
    # sparsity; 180 GB, 7.7 TB/s.
    _gpu(
        "b200", "blackwell", 180, 7700, 148,
        fp32=75.0, tf32=1100.0, fp16=2250.0, bf16=2250.0, fp8=4500.0,
    ),
    # NVIDIA GB200 NVL72 (Blackwell data sheet), per GPU: 80; 2,500, 5,000 and 10,000 with
    # sparsity; 186 GB, 8 TB/s.
    _gpu(
        "gb200", "blackwell", 186, 8000, 148,
        fp32=80.0, tf32=1250.0, fp16=2500.0, bf16=2500.0, fp8=5000.0,
    ),
    # AMD Instinct MI300X data sheet: matrix peaks without sparsity; 192 GB, 5.3 TB/s.
    _gpu(
        "mi300x", "cdna3", 192, 5300, 304,
        fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9,
    ),
    # The host's processor: memory and speed depend on the machine.
    Gpu("cpu", None),
)  # fmt: skip

GPUS: Mapping[str, Gpu] = {entry.name: entry for entry in _GPUS}


def gpu(name: str) -> Gpu:
    """Look an accelerator up by its catalogue name, in any case (`H100-80GB`).

    Raises PlanError naming the known accelerators when there is none of that name.
    """
    found = GPUS.get(name.lower())
    if found is None:
        matches = get_close_matches(name.lower()[:80], list(GPUS), 1)
        raise PlanError(
            f"cluster.gpu: found {name[:80]!r}; known: {', '.join(GPUS)}",
            fix=f"did you mean `{matches[0]}`?" if matches else "choose one of these names",
        )
    return found
