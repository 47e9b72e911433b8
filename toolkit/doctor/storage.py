"""Disks and shared memory."""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.doctor.finding import Finding, lacking
from toolkit.doctor.needs import Needs
from toolkit.system.compilers import file_system
from toolkit.text.units import byte_size

LEAST_BYTES = 64 * 2**20
"""Bytes that a run writes besides checkpoints."""
LEAST_SHARED_BYTES = 512 * 2**20
"""NCCL takes about 10 MB per channel and pair of ranks (NVIDIA/nccl#342). A container has
64 MiB by default."""


def check(needs: Needs) -> Iterator[Finding]:
    """The run directory's disk, the NVMe folder and shared memory."""
    yield _disk(needs)
    if needs.nvme is not None:
        yield _nvme(needs.nvme)
    yield from _shared_memory(Path("/dev/shm"), needs)


def _disk(needs: Needs) -> Finding:
    name, folder = "run directory", needs.run_dir.absolute()
    while not folder.is_dir():
        folder = folder.parent
    folder = folder.resolve()
    if not os.access(folder, os.W_OK):
        return lacking(
            name, f"cannot write in {folder}", cost="a run cannot start",
            fix="name another folder with --run-dir", needed_by=needs.run,
        )  # fmt: skip
    system, free = file_system(folder), shutil.disk_usage(folder).free
    text = f"{folder}: {system}, {byte_size(free)} free"
    # A new one is complete before an old one is removed.
    most = needs.checkpoints_kept + 1
    wanted = most * (needs.checkpoint_bytes or 0)
    if free < max(wanted, LEAST_BYTES):
        if wanted:
            text += f", but {most} checkpoints (checkpoint.keep + 1) take {byte_size(wanted)}"
        return Finding(
            name, "warning", text, cost="a save fails, and with it the run",
            fix="remove old runs, or name another disk with --run-dir",
        )  # fmt: skip
    return Finding(name, "ok", text)


def _nvme(folder: Path) -> Finding:
    name, setting = "NVMe folder", f"parallel.zero.nvme_path: {folder}"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        quoted = shlex.quote(str(folder))
        return lacking(
            name, f"{folder} is not a writable folder", cost="the run cannot start",
            fix=f"mkdir -p -- {quoted} && test -w {quoted}", needed_by=setting,
        )  # fmt: skip
    free = byte_size(shutil.disk_usage(folder).free)
    return Finding(name, "ok", f"{folder}: {file_system(folder.resolve())}, {free} free")


def _shared_memory(folder: Path, needs: Needs) -> Iterator[Finding]:
    """Check shared memory on machines with GPUs. NCCL's ranks exchange data through it."""
    if not folder.is_dir() or not (needs.gpu or Path("/proc/driver/nvidia").is_dir()):
        return
    usage = shutil.disk_usage(folder)
    text = f"{byte_size(usage.free)} of {byte_size(usage.total)} free"
    if usage.free < LEAST_SHARED_BYTES:
        yield Finding(
            str(folder), "warning", text, cost="NCCL may fail (NVIDIA/nccl#342)",
            fix=f"docker run --shm-size=8g …, or mount -o remount,size=8G {folder}",
        )  # fmt: skip
    else:
        yield Finding(str(folder), "ok", text)
