"""Disks and memory: space, speed and the limits of this process."""

import os
import resource
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no type hints of its own

from toolkit.doctor.finding import Finding, Level
from toolkit.doctor.needs import Needs
from toolkit.system.compilers import NETWORK_SYSTEMS, file_system
from toolkit.text.units import byte_size

TRIAL_BYTES = 64 * 2**20
"""Bytes written to measure a disk: more than the usual cache of a disk's controller."""
SLOW_BYTES_PER_S = 100e6
"""Below it a checkpoint takes longer than a plan assumes by far (a hard disk, a busy share)."""
LEAST_SHARED_BYTES = 512 * 2**20
"""NCCL takes about 10 MB per channel and pair of ranks (NVIDIA/nccl#342); a container has
64 MiB by default."""
LEAST_FILES = 4096
LEAST_LOCKED_BYTES = 2**30


def check(needs: Needs) -> Iterator[Finding]:
    """The run directory's disk, the NVMe folder, shared memory and limits."""
    yield from _disk(needs)
    if needs.nvme is not None:
        yield from _nvme(needs.nvme)
    yield from _shared_memory(Path("/dev/shm"))
    yield _memory()
    yield from _limits(needs)


def _disk(needs: Needs) -> Iterator[Finding]:
    name, folder = "run directory", needs.run_dir.absolute()
    while not folder.is_dir():
        folder = folder.parent
    folder = folder.resolve()
    if not os.access(folder, os.W_OK):
        fix = "name another folder with --run-dir"
        yield Finding(name, "problem", f"cannot write in {folder}", needs.run, fix)
        return
    system = file_system(folder)
    free = shutil.disk_usage(folder).free
    text = f"{folder}: {system}, {byte_size(free)} free"
    # A new one is complete before an old one is removed.
    most = needs.checkpoints_kept + 1
    wanted = most * (needs.checkpoint_bytes or 0)
    if free < max(wanted, TRIAL_BYTES):
        if wanted:
            text += f", but {most} checkpoints (checkpoint.keep + 1) take {byte_size(wanted)}"
        fix = "remove old runs, or name another disk with --run-dir"
        yield Finding(name, "warning", text, None, fix)
    elif system == "tmpfs":
        text += ": in memory, and gone after a restart of the machine"
        yield Finding(name, "note", text, None, "name a folder on a disk with --run-dir")
    else:
        yield Finding(name, "ok", text)
    if free > 2 * TRIAL_BYTES:
        yield _speed(folder, system, needs)


def _speed(folder: Path, system: str, needs: Needs) -> Finding:
    name = "disk speed"
    try:
        speed = write_speed(folder)
    except OSError as error:
        text = f"writing to {folder} failed: {error}"
        return Finding(name, "problem", text, needs.run, "look at the disk: dmesg")
    shared = ", a network file system" if system.startswith(NETWORK_SYSTEMS) else ""
    text = f"{speed / 1e6:,.0f} MB/s written and synchronised{shared}"
    if speed < SLOW_BYTES_PER_S:
        fix = "name a folder on a faster disk with --run-dir, or raise checkpoint.every_steps"
        return Finding(name, "warning", f"{text}: saves take long", None, fix)
    return Finding(name, "ok", text)


def write_speed(folder: Path) -> float:
    """Bytes per second until a file of TRIAL_BYTES is on the disk of `folder`."""
    block = os.urandom(2**20)  # no file system can compress it
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".dmt-doctor-") as file:
        began = time.perf_counter()
        for _ in range(TRIAL_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return TRIAL_BYTES / (time.perf_counter() - began)


def _nvme(folder: Path) -> Iterator[Finding]:
    name, setting = "NVMe folder", f"parallel.zero.nvme_path: {folder}"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        quoted = shlex.quote(str(folder))
        fix = f"mkdir -p -- {quoted} && test -w {quoted}"
        text = f"{folder} is not a writable folder"
        yield Finding(name, "problem", text, setting, fix)
        return
    system = file_system(folder.resolve())
    if system == "tmpfs":
        text = f"{folder} is tmpfs: offload to it takes the memory that it should spare"
        yield Finding(name, "warning", text, setting, "name a folder on a local disk")
    else:
        free = byte_size(shutil.disk_usage(folder).free)
        yield Finding(name, "ok", f"{folder}: {system}, {free} free")


def _shared_memory(folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    text = f"{byte_size(usage.free)} of {byte_size(usage.total)} free"
    if usage.free < LEAST_SHARED_BYTES:
        fix = f"docker run --shm-size=8g …, or mount -o remount,size=8G {folder}"
        text += "; NCCL fails where it is too small (NVIDIA/nccl#342)"
        yield Finding(str(folder), "warning", text, None, fix)
    else:
        yield Finding(str(folder), "ok", text)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{byte_size(memory.available)} of {byte_size(memory.total)} free"
    # Of the control group, as containers and Slurm set it.
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # not there, or `max`
            limit = int(Path(file).read_text())
            if limit < memory.total:
                text += f"; this group of processes may take {byte_size(limit)}"
            break
    return Finding("memory", "ok", text)


def _limits(needs: Needs) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY or files >= LEAST_FILES:
        yield Finding("open files", "ok", _limit(files))
    else:
        text = f"{files} a process; many ranks and data files need more"
        yield Finding("open files", "note", text, None, f"ulimit -n {LEAST_FILES}")
    # InfiniBand and DeepSpeed's asynchronous I/O pin memory.
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked == resource.RLIM_INFINITY or locked >= LEAST_LOCKED_BYTES:
        yield Finding("locked memory", "ok", _limit(locked, "B"))
        return
    text = f"{byte_size(locked)}; InfiniBand and NVMe offload pin more"
    fix = "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1 …"
    pinning = needs.ops.get("async_io") or (needs.gpu and needs.several_machines)
    level: Level = "warning" if pinning else "note"
    yield Finding("locked memory", level, text, pinning or None, fix)


def _limit(value: int, unit: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,} {unit}".strip()
