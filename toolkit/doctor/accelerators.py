"""GPUs as torch sees them, the driver, and the communication libraries."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.doctor.finding import Finding, ask, ask_python, is_installed, lacking
from toolkit.doctor.needs import Needs
from toolkit.text.units import GIB

OLDEST_DRIVER: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
"""Oldest driver for each major version of CUDA. Source:
docs.nvidia.com/deploy/cuda-compatibility, minor versions."""
BF16_CAPABILITY = (8, 0)
"""Least capability with bf16 units (Ampere). Older GPUs only emulate bf16."""

_TORCH = """
import json, torch, torch.distributed as dist
cuda = torch.cuda
seen = cuda.device_count() if cuda.is_available() else 0
devices = [cuda.get_device_properties(i) for i in range(seen)]
print(json.dumps({
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "devices": [[d.name, d.total_memory, d.major, d.minor] for d in devices],
    "nccl": ".".join(map(str, cuda.nccl.version())) if dist.is_nccl_available() else None,
}))
"""
_REINSTALL = "pip install --force-reinstall torch"


def check(needs: Needs) -> Iterator[Finding]:
    """Ask torch in a separate process, because a broken driver may crash or hang it."""
    if not is_installed("torch"):
        return  # `packages` says so
    answer = ask_python(_TORCH)
    if not answer.done:
        yield Finding(
            "torch", "problem", f"cannot be imported: {answer.out}", cost="nothing can train",
            fix=_REINSTALL, needed_by=needs.packages.get("torch"),
        )  # fmt: skip
        return
    torch = json.loads(answer.out.splitlines()[-1])
    driver = _driver()
    yield _driver_finding(torch, driver, needs)
    yield from _devices(torch, driver, needs)
    if torch["nccl"] is not None:
        yield Finding("NCCL", "ok", torch["nccl"])
    elif torch["devices"] or needs.gpu:
        yield lacking(
            "NCCL", "not in this torch", cost="GPUs cannot talk to each other", fix=_REINSTALL,
            needed_by=needs.gpu, otherwise="warning",
        )  # fmt: skip


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    text = file.read_text(errors="replace") if file.is_file() else ""
    if found := re.search(r"\s(\d{3}\.[\d.]+)\s", text):
        return found[1]
    answer = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 30)
    return answer.out.split()[0] if answer.done and answer.out.strip() else None


def _driver_finding(torch: Mapping[str, Any], driver: str | None, needs: Needs) -> Finding:
    built = f"torch is built for CUDA {torch['cuda']}"
    if torch["cuda"] is None:
        built = (
            f"torch is built for ROCm {torch['hip']}" if torch["hip"] else "torch has no CUDA"
        )
    if driver is None or torch["cuda"] is None:
        return Finding("driver", "ok", f"{driver or 'none'}; {built}")
    oldest = OLDEST_DRIVER.get(int(torch["cuda"].partition(".")[0]), 0)
    number = int(driver.partition(".")[0])
    if number >= oldest:
        return Finding("driver", "ok", f"{driver}; {built}")
    fix = f"install NVIDIA driver {oldest} or later"
    if number >= OLDEST_DRIVER[12]:
        # Without --force-reinstall pip keeps the torch that is there, whatever the index.
        fix = f"{_REINSTALL} --index-url https://download.pytorch.org/whl/cu128"
    return lacking(
        "driver", f"{driver}; {built}, which needs {oldest} or later", fix=fix,
        cost="torch sees no GPU", needed_by=needs.gpu, otherwise="warning",
    )  # fmt: skip


def _devices(torch: Mapping[str, Any], driver: str | None, needs: Needs) -> Iterator[Finding]:
    devices = torch["devices"]
    if len(devices) < needs.gpus or (driver is not None and not devices):
        yield _too_few(torch, driver, needs)
    elif not devices:
        yield Finding("GPUs", "ok", "none")
    for index, (name, memory, major, minor) in enumerate(devices):
        text = f"{name}, {memory / GIB:.0f} GiB, compute capability {major}.{minor}"
        label = f"GPU {index}"
        if torch["cuda"] and needs.precision == "bf16" and (major, minor) < BF16_CAPABILITY:
            yield Finding(
                label, "problem", f"{text}; bf16 needs 8.0", fix="training.precision: fp16",
                cost="bf16 is emulated, many times slower",
                needed_by="training.precision: bf16",
            )  # fmt: skip
        else:
            yield Finding(label, "ok", text)


def _too_few(torch: Mapping[str, Any], driver: str | None, needs: Needs) -> Finding:
    count = len(torch["devices"])
    text = f"torch sees {count or 'none'}"
    if needs.gpus:
        text += f"; the recipe has {needs.gpus} a machine"
    fix = "--set cluster.gpu=cpu, or a machine with GPUs"
    if count:
        fix = f"--set cluster.gpus_per_node={count}, and look at CUDA_VISIBLE_DEVICES"
    elif driver is not None and torch["cuda"] is None:
        text += ", though there is a driver: this torch is built without CUDA"
        fix = _REINSTALL
    elif driver is not None:
        text += ", though there is a driver"
        fix = "nvidia-smi, and unset CUDA_VISIBLE_DEVICES"
    return lacking(
        "GPUs", text, cost="a recipe for GPUs cannot start here", fix=fix, needed_by=needs.gpu,
        otherwise="warning",
    )  # fmt: skip
