"""Real ranks without the seconds that imports take: forked from a server that has them.

For tests with hundreds of starts. Otherwise they are processes like any other.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from toolkit.engines.distributed import end_process
from toolkit.launchers.base import free_port

GRACE_S = 20.0
"""How long a rank may outlive another one that has failed."""


class ForkedRanks:
    """`world` processes that each call `target(*arguments)`, whose result is the exit code.

    `target` is a function of a module that the server has imported: see `preload`.
    """

    def __init__(
        self, target: Callable[..., int], arguments: Sequence[Any], world: int, folder: Path
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        common = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        self.outputs = [folder / f"rank-{rank}.out" for rank in range(world)]
        self._processes = []
        for rank, output in enumerate(self.outputs):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(
                target=_rank, args=(environment, folder, output, target, arguments)
            )
            process.start()
            self._processes.append(process)

    @property
    def has_ended(self) -> bool:
        return not any(process.is_alive() for process in self._processes)

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that run now."""
        return {
            rank: psutil.Process(process.pid)
            for rank, process in enumerate(self._processes)
            if process.is_alive()
        }

    def end(self, limit_s: float) -> list[int | None]:
        """Wait for the end; exit codes. When a rank fails, the others are told to stop.

        Fails when that takes longer than GRACE_S, or all of it longer than `limit_s`.
        """
        deadline, told = time.monotonic() + limit_s, False
        try:
            while not self.has_ended:
                failed = any(process.exitcode for process in self._processes)
                if failed and not told:
                    told, deadline = True, time.monotonic() + GRACE_S
                    for process in self._processes:
                        process.terminate()
                assert time.monotonic() < deadline, f"a rank hangs\n{self.printed()}"
                time.sleep(0.005)
        finally:
            self.kill()
        return [process.exitcode for process in self._processes]

    def kill(self) -> None:
        """Kill what is left."""
        for process in self._processes:
            process.kill()
            process.join()

    def printed(self) -> str:
        """What all ranks printed."""
        return "\n".join(path.read_text() for path in self.outputs if path.exists())


def preload(*modules: str) -> None:
    """Let the server import `modules`, if it was not started before."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *modules])


def _rank(
    environment: dict[str, str],
    folder: Path,
    output: Path,
    target: Callable[..., int],
    arguments: Sequence[Any],
) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    code = 1
    try:
        code = target(*arguments)
    finally:
        end_process(code)
