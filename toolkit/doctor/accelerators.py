"""GPUs as torch sees them, the driver, and the communication libraries."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.doctor.finding import Finding, ask_python, is_installed, lacking
from toolkit.doctor.needs import Needs
from toolkit.text.units import GIB

BF16_CAPABILITY = (8, 0)
"""Least capability with bf16 units (Ampere). Older GPUs only emulate bf16."""

_TORCH = """
import json, torch, torch.distributed as dist
from torch.utils.collect_env import get_nvidia_driver_version, run
cuda, devices, why = torch.cuda, [], ""
try:
    cuda.init()
    devices = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
except Exception as error:
    why = str(error).partition(". ")[0].rstrip(".")
print(json.dumps({
    "driver": get_nvidia_driver_version(run),
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "devices": [[d.name, d.total_memory, d.major, d.minor] for d in devices],
    "why": why,
    "nccl": ".".join(map(str, cuda.nccl.version())) if dist.is_nccl_available() else None,
}))
"""
_KINDS = {"cuda": "CUDA", "hip": "ROCm"}
_REINSTALL = "pip install --force-reinstall torch"
_OLD_DRIVER = (
    "install a newer NVIDIA driver, or from driver 525 on "
    f"{_REINSTALL} --index-url https://download.pytorch.org/whl/cu128"
)


def check(needs: Needs) -> Iterator[Finding]:
    """Ask torch in a separate process, because a broken driver may crash or hang it."""
    if not is_installed("torch"):
        return  # `packages` says so
    answer = ask_python(_TORCH)
    if not answer.done:
        yield lacking(
            "torch", f"cannot be imported: {answer.out}", cost="nothing can train",
            fix=_REINSTALL, needed_by=needs.packages.get("torch"),
        )  # fmt: skip
        return
    torch = json.loads(answer.out.splitlines()[-1])
    kinds = (f"{kind} {torch[key]}" for key, kind in _KINDS.items() if torch[key])
    built = next(kinds, "CPUs")
    yield Finding("driver", "ok", f"{torch['driver'] or 'none'}; torch is built for {built}")
    yield from _devices(torch, needs)
    if torch["nccl"] is not None:
        yield Finding("NCCL", "ok", torch["nccl"])


def _devices(torch: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    devices = torch["devices"]
    if len(devices) < needs.gpus or (torch["driver"] is not None and not devices):
        yield _too_few(torch, needs)
    elif not devices:
        yield Finding("GPUs", "ok", "none")
    for index, (name, memory, major, minor) in enumerate(devices):
        text = f"{name}, {memory / GIB:.0f} GiB, compute capability {major}.{minor}"
        label = f"GPU {index}"
        if torch["cuda"] and needs.precision == "bf16" and (major, minor) < BF16_CAPABILITY:
            yield lacking(
                label, f"{text}; bf16 needs 8.0", fix="training.precision: fp16",
                cost="bf16 is emulated, many times slower",
                needed_by="training.precision: bf16",
            )  # fmt: skip
        else:
            yield Finding(label, "ok", text)


def _too_few(torch: Mapping[str, Any], needs: Needs) -> Finding:
    count, why = len(torch["devices"]), torch["why"]
    text = f"torch sees {count or 'none'}"
    if needs.gpus:
        text += f"; the recipe has {needs.gpus} a machine"
    if count:
        fix = f"--set cluster.gpus_per_node={count}, and look at CUDA_VISIBLE_DEVICES"
    elif "too old" in why:
        fix = _OLD_DRIVER
    elif torch["driver"] is None:
        fix = "--set cluster.gpu=cpu, or a machine with GPUs"
    elif torch["cuda"] is None:
        fix = _REINSTALL
    else:
        fix = "nvidia-smi, and unset CUDA_VISIBLE_DEVICES"
    return lacking(
        "GPUs", f"{text}{'; ' * bool(why)}{why}", cost="a recipe for GPUs cannot start here",
        fix=fix, needed_by=needs.gpu,
    )  # fmt: skip
