"""Measures this machine and writes a cluster file.

The planner uses the file's `measured` speeds instead of data sheets (`--cluster FILE`).
"""

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.doctor.speeds import Speeds
from toolkit.errors import EXIT_DONE, BackendUnavailable, RunFailed
from toolkit.launchers.base import Job
from toolkit.launchers.local import LocalStarter
from toolkit.launchers.process import StopSignals
from toolkit.plan.hardware.catalogue import GIGA, GPUS, TERA, name_of_device
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import ClusterSection
from toolkit.text.terminal import tell
from toolkit.text.units import GIB

HEADER = "# Written by `dmt doctor --calibrate`"


@dataclass(frozen=True)
class Machine:
    """The machine to measure."""

    gpu: str
    """Name of the hardware catalogue, or the device's own where that lacks it."""
    processes: int
    """One per GPU, or as many as share the processor."""
    device: str = ""
    """The GPU's own name where `gpu` is the catalogue's closest (`closest`)."""


def this_machine() -> Machine:
    """This machine with one process per GPU, or at most two on a CPU."""
    if torch.cuda.is_available():
        name = name_of_device(torch.cuda.get_device_properties(0).name)
        return Machine(name, torch.cuda.device_count())
    return Machine("cpu", min(2, len(os.sched_getaffinity(0))))


def check_known(machine: Machine, option: str = "--calibrate") -> None:
    """Raise BackendUnavailable if the catalogue lacks the machine's GPU. A cluster file states
    measurements on top of a data sheet."""
    if machine.gpu not in GPUS:
        raise BackendUnavailable(
            f"{option}: the hardware catalogue does not know {machine.gpu!r}",
            fix="write a cluster file with `gpu: {like: NAME}` and what you know of it "
            "(docs/cluster.md)",
        )


def closest(machine: Machine, option: str) -> Machine:
    """The machine, with a catalogue GPU of its generation if the catalogue lacks its own.
    Comparisons need a name, not a data sheet.

    Raises BackendUnavailable for an unknown GPU that is not NVIDIA's.
    """
    if machine.gpu in GPUS:
        return machine
    if torch.version.hip is not None:
        check_known(machine, option)
    is_hopper = torch.cuda.get_device_capability(0) >= (9, 0)
    return replace(machine, gpu="h100-80gb" if is_hopper else "a100-80gb", device=machine.gpu)


def calibrate(machine: Machine) -> Speeds:
    """Measure, with a line on standard error about each quantity.

    Raises RunFailed when a process failed.
    """
    count = f"{machine.processes} process{'es' * (machine.processes > 1)}"
    tell(f"measuring {machine.gpu} with {count}")
    with tempfile.TemporaryDirectory(prefix="dmt-calibrate-") as folder:
        result = Path(folder) / "result.json"
        section = ClusterSection(gpus_per_node=machine.processes, gpu=machine.gpu)
        worker = ("-m", "toolkit.doctor.speeds", str(result))
        launcher = LocalStarter()
        with StopSignals() as signals:
            job = Job(Path(folder), section, worker=worker)
            code = launcher.run(launcher.spec(job), signals)
        if code != EXIT_DONE:
            raise RunFailed("dmt doctor: measuring did not come to its end")
        return Speeds(**json.loads(result.read_text(encoding="utf-8")))


def cluster_text(machine: Machine, speeds: Speeds) -> str:
    """The cluster file of this machine, to be edited and kept."""
    measured: dict[str, Any] = {
        "tflops": {name: _digits(one / TERA) for name, one in speeds.matmul_flops.items()},
        "memory_gigabytes_per_s": _digits(speeds.memory_bytes_per_s / GIGA),
    }
    if speeds.link_bytes_per_s is not None:
        measured["node_link_gigabytes_per_s"] = _digits(speeds.link_bytes_per_s / GIGA)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    values = {
        "nodes": 1,
        "gpus_per_node": machine.processes,
        "gpu": machine.gpu,
        "host_memory_gib": round(memory_bytes / GIB, 1),
        "measured": measured,
    }
    return f"""\
{HEADER}: speeds of each of {machine.processes} process(es), measured while all
# of them worked. Use it with `dmt plan RECIPE --cluster FILE`. For more of the same machine
# change `nodes`, and state `network`.
{dump(values, flow=False)}"""


def _digits(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")
