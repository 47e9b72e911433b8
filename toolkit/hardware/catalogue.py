"""Accelerators by name: memory and peak speed, from the vendors' data sheets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolkit.errors import PlanError
from toolkit.recipe.schema import GpuSection
from toolkit.text.suggest import closest

GIGA = 1e9
TERA = 1e12

Generation = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna3", "cpu"]
"""NVIDIA's in the order of their years."""


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Peaks are dense (no structured sparsity), in FLOP/s; None where
    the device has no such unit (or, for `cpu`, where no figure is stated)."""

    name: str
    memory_gib: float | None
    """What the driver leaves of the marketed capacity: the total that CUDA and ROCm report
    (`torch.cuda.get_device_properties`), the least that is reported for the part."""
    fp32: float | None = None
    """fp32 inputs, multiplied exactly (no TF32)."""
    tf32: float | None = None
    """fp32 inputs, rounded to TF32 in the tensor cores; off unless the user asks for it."""
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    memory_bytes_per_s: float | None = None
    """Peak bandwidth of the device's own memory."""
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
    **peaks_tera: float,
) -> Gpu:
    peaks: dict[str, Any] = {unit: peak * TERA for unit, peak in peaks_tera.items()}
    return Gpu(
        name,
        memory_gib,
        **peaks,
        memory_bytes_per_s=memory_gb_per_s * GIGA,
        generation=generation,
    )


_A100 = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
# H100 and H200 sheets print figures with 2:4 sparsity: half of 989, 1,979 and 3,958.
_H100_SXM = {"fp32": 67.0, "tf32": 494.5, "fp16": 989.5, "bf16": 989.5, "fp8": 1979.0}

# GeForce and RTX: the tensor cores' rate with fp32 sums, which training needs.
_GPUS = (
    # NVIDIA V100 data sheet (SXM2): 15.7 TFLOPS single, 125 TFLOPS tensor, 32 GB, 900 GB/s.
    # Volta has neither bf16 nor TF32.
    _gpu("v100-32gb", "volta", 31.7, 900, fp32=15.7, fp16=125.0),
    # NVIDIA A100 data sheets, 40 GB and 80 GB; PCIe and SXM have the same peaks, memory of
    # 1,555 (40 GB), 1,935 (80 GB PCIe) and 2,039 GB/s (80 GB SXM).
    _gpu("a100-40gb", "ampere", 39.4, 1555, **_A100),
    _gpu("a100-40gb-pcie", "ampere", 39.4, 1555, **_A100),
    _gpu("a100-80gb", "ampere", 79.1, 2039, **_A100),
    _gpu("a100-80gb-pcie", "ampere", 79.1, 1935, **_A100),
    # NVIDIA H100 data sheet, SXM column: 3.35 TB/s.
    _gpu("h100-80gb", "hopper", 79.1, 3350, **_H100_SXM),
    # An H100 SXM with 96 GB of HBM2e at 500 W, as torchtitan's benchmarks describe theirs. No
    # data sheet is public: peaks of the SXM part, which torchtitan computes its MFU with;
    # memory as six stacks of HBM2e; the H100 PCIe has five (2,039 GB/s).
    _gpu("h100-96gb", "hopper", 95.0, 2447, **_H100_SXM),
    # NVIDIA H100 data sheet, PCIe column (51; 756, 1,513 and 3,026 with sparsity), 2.0 TB/s.
    _gpu(
        "h100-80gb-pcie", "hopper", 79.1, 2000,
        fp32=51.0, tf32=378.0, fp16=756.5, bf16=756.5, fp8=1513.0,
    ),
    # NVIDIA H200 data sheet, SXM column: an H100 with 141 GB at 4.8 TB/s.
    _gpu("h200", "hopper", 139.7, 4800, **_H100_SXM),
    # NVIDIA HGX B200 (Blackwell data sheet), per GPU: 75; 2,200, 4,500 and 9,000 with
    # sparsity; 180 GB, 7.7 TB/s.
    _gpu(
        "b200", "blackwell", 178.3, 7700,
        fp32=75.0, tf32=1100.0, fp16=2250.0, bf16=2250.0, fp8=4500.0,
    ),
    # NVIDIA GB200 NVL72 (Blackwell data sheet), per GPU: 80; 2,500, 5,000 and 10,000 with
    # sparsity; 186 GB, 8 TB/s.
    _gpu(
        "gb200", "blackwell", 184.3, 8000,
        fp32=80.0, tf32=1250.0, fp16=2500.0, bf16=2500.0, fp8=5000.0,
    ),
    # NVIDIA HGX B300 data sheet, per GPU: 75; 2,250, 4,500 and 9,000 with sparsity; 288 GB,
    # 8 TB/s.
    _gpu(
        "b300", "blackwell", 267.6, 8000,
        fp32=75.0, tf32=1125.0, fp16=2250.0, bf16=2250.0, fp8=4500.0,
    ),
    # NVIDIA GH200 Grace Hopper data sheet: an H100 with 96 GB of HBM3 at 4 TB/s.
    _gpu("gh200", "hopper", 94.5, 4000, **_H100_SXM),
    # NVIDIA H20 data sheet: 44; 74, 148 and 296; 96 GB of HBM3 at 4 TB/s.
    _gpu(
        "h20", "hopper", 95.0, 4000, fp32=44.0, tf32=74.0, fp16=148.0, bf16=148.0, fp8=296.0
    ),
    # NVIDIA L40S data sheet: 91.6; 183, 362 and 733 without sparsity; 48 GB, 864 GB/s.
    _gpu(
        "l40s", "ada", 44.4, 864,
        fp32=91.6, tf32=183.0, fp16=362.05, bf16=362.05, fp8=733.0,
    ),
    # NVIDIA L4 data sheet: 30.3; 120, 242 and 485 with sparsity; 24 GB, 300 GB/s.
    _gpu("l4", "ada", 22.0, 300, fp32=30.3, tf32=60.0, fp16=121.0, bf16=121.0, fp8=242.5),
    # NVIDIA Ada white paper, appendix A: 82.6; 82.6, 165.2 and 330.3; 24 GB, 1,008 GB/s.
    _gpu(
        "rtx4090", "ada", 23.5, 1008,
        fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3,
    ),
    # NVIDIA RTX Blackwell white paper, appendix A: 104.8; 104.8, 209.5 and 419; 32 GB,
    # 1,792 GB/s.
    _gpu(
        "rtx5090", "blackwell", 31.3, 1792,
        fp32=104.8, tf32=104.8, fp16=209.5, bf16=209.5, fp8=419.0,
    ),
    # NVIDIA Ampere GA102 white paper, appendix A (RTX 3090: 35.6; 35.6 and 71; 24 GB, 936 GB/s;
    # RTX A6000: 38.7; 77.4 and 154.8; 48 GB, 768 GB/s).
    _gpu("rtx3090", "ampere", 23.6, 936, fp32=35.6, tf32=35.6, fp16=71.0, bf16=71.0),
    _gpu("a6000", "ampere", 47.4, 768, fp32=38.7, tf32=77.4, fp16=154.8, bf16=154.8),
    # NVIDIA A10 and A10G data sheets: 31.2; 62.5 and 125, and 35; 35 and 70; 24 GB, 600 GB/s.
    _gpu("a10", "ampere", 21.9, 600, fp32=31.2, tf32=62.5, fp16=125.0, bf16=125.0),
    _gpu("a10g", "ampere", 21.9, 600, fp32=35.0, tf32=35.0, fp16=70.0, bf16=70.0),
    # NVIDIA T4 data sheet: 8.1; 65; 16 GB, 320 GB/s. Turing has neither bf16 nor TF32.
    _gpu("t4", "turing", 14.5, 320, fp32=8.1, fp16=65.0),
    # AMD Instinct MI300X data sheet: matrix peaks without sparsity; 192 GB, 5.3 TB/s.
    _gpu(
        "mi300x", "cdna3", 191.6, 5300,
        fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9,
    ),
    # The host's processor: memory and speed depend on the machine.
    Gpu("cpu", None),
)  # fmt: skip

GPUS: Mapping[str, Gpu] = {entry.name: entry for entry in _GPUS}


def accelerator(stated: str | GpuSection) -> Gpu:
    """What a recipe's `cluster.gpu` names or describes. Raises PlanError for unknown names."""
    if isinstance(stated, str):
        return gpu(stated)
    return described(gpu(stated.like), stated.model_dump(exclude_none=True))


def described(base: Gpu, stated: Mapping[str, Any]) -> Gpu:
    """An accelerator of the catalogue with some figures replaced by the user's."""
    changes = figures(stated)
    if "name" in stated:
        changes |= {"name": stated["name"], "like": base.name}
    if "memory_gib" in stated:
        changes["memory_gib"] = stated["memory_gib"]
    return replace(base, **changes)


def figures(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Speeds of an accelerator, in the units of `Gpu`."""
    found: dict[str, Any] = {
        name: value * TERA for name, value in stated.get("tflops", {}).items()
    }
    if "memory_gigabytes_per_s" in stated:
        found["memory_bytes_per_s"] = stated["memory_gigabytes_per_s"] * GIGA
    return found


_ONE_KEY = 0.9
"""Similarity of names that differ by about one character."""
_ALIASES = {"v100": "v100-32gb", "a100": "a100-80gb", "h100": "h100-80gb"}
"""Names of products that are sold with several memories, and the usual one."""
_SOLD_AS: Mapping[str, Generation] = {
    r"v100|titanv": "volta",
    r"(rtx)?20\d\d|titanrtx|gtx16|(quadrortx|rtx)[4-8]000$|t[4-8]": "turing",
    r"a\d+|(rtx)?30\d\d|rtxa\d+": "ampere",
    r"(rtx)?40\d\d|l\d+|rtx\d+ada": "ada",
    r"g?h\d+": "hopper",
    r"g?b\d+|(rtx)?50\d\d|rtxpro": "blackwell",
    r"mi3\d\d": "cdna3",
}
"""Beginnings of product names, without spaces and the vendor."""


def _similar(name: str) -> str:
    """What a name that is not in the catalogue may mean: a slip of the keys, a longer name of
    the product, or the nearest of its generation."""
    words = re.findall(r"[a-z0-9]+", name[:80].lower())
    family = [one for one in GPUS if one.partition("-")[0] in words]
    near = closest(name.lower(), GPUS, _ONE_KEY)
    if not near and family:
        usual = _ALIASES.values()
        near = max(family, key=lambda one: (len({*words} & {*one.split("-")}), one in usual))
    if not near:
        sold = re.sub("nvidia|geforce|amd|instinct|tesla", "", "".join(words))
        found = [kind for start, kind in _SOLD_AS.items() if re.match(start, sold)]
        same = [one.name for one in GPUS.values() if one.generation in found[:1]]
        near = closest(sold, same, 0.0)
    return f"did you mean `{near}`?" if near else "choose one of these,"


def gpu(name: str) -> Gpu:
    """Look an accelerator up by its catalogue name, in any case (`H100-80GB`, `h100`).

    Raises PlanError naming the known accelerators when there is none of that name.
    """
    found = GPUS.get(_ALIASES.get(name.lower(), name.lower()))
    if found is None:
        raise PlanError(
            f"cluster.gpu: found {name[:80]!r}; known: {', '.join(GPUS)}",
            fix=f"{_similar(name)} or"
            " describe yours by the closest: {like: h100-80gb, memory_gib: 94, …}",
        )
    return found
