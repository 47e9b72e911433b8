"""Real ranks for tests: one process each, gloo, a free port, a time limit, no leftovers."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.launchers.base import free_port

ROOT = Path(__file__).parent.parent


def run_ranks(
    argv: Sequence[str],
    world: int,
    *,
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """Run `python ARGV` once per rank; return what each printed on standard output.

    Fails with the output of the first failed rank; kills every rank at the time limit.
    """
    port = str(free_port())
    files = [tempfile.TemporaryFile("w+") for _ in range(2 * world)]  # noqa: SIM115 - below
    processes = [
        subprocess.Popen(
            [sys.executable, *argv],
            stdout=files[2 * rank],
            stderr=files[2 * rank + 1],
            start_new_session=True,
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "PYTHONWARNINGS": "ignore::FutureWarning",
                **(env or {}),
            },
        )
        for rank in range(world)
    ]
    try:
        _wait(processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    outputs = []
    for file in files:
        file.seek(0)
        outputs.append(file.read())
        file.close()
    # The rank that failed by itself comes before those that were killed because of it.
    order = sorted(range(world), key=lambda rank: processes[rank].returncode < 0)
    for rank in order:
        code, tail = processes[rank].returncode, outputs[2 * rank + 1][-4000:]
        assert code == 0, f"rank {rank} ended with {code}:\n{tail}"
    return outputs[0::2]


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", deadline: float) -> None:
    """Return when all have ended, one has failed, or the time is over."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(codes):
            return
        time.sleep(0.05)
