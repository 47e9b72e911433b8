"""Starting a launcher in a process of its own, and looking at what it leaves behind."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launchers.watching import STAND_IN, WarmProcess
from tests.processes import wait_until
from toolkit.launchers import ranks as ranks_of_a_machine
from toolkit.launchers.base import Job, starter
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection, LaunchSection


def run_stand_ins(
    name: str, run_dir: Path, behaviour: str, ranks: int, failed_grace_s: float
) -> int:
    """Launch stand-in workers; returns the exit code."""
    ranks_of_a_machine.FAILED_GRACE_S = failed_grace_s
    cluster, launch = ClusterSection(gpus_per_node=ranks), LaunchSection()
    worker = tuple(map(str, (STAND_IN, run_dir, behaviour)))
    chosen = starter(name)
    spec = chosen.spec(Job(run_dir, cluster, launch, worker=worker))
    spec.write_files()
    with StopSignals() as signals:
        return chosen.run(spec, signals)


class Launch:
    """A launcher process with stand-in workers."""

    def __init__(
        self,
        name: str,
        run_dir: Path,
        behaviour: str,
        ranks: int = 2,
        failed_grace_s: float = ranks_of_a_machine.FAILED_GRACE_S,
    ) -> None:
        self.run_dir = run_dir
        self.ranks = ranks
        arguments = name, run_dir, behaviour, ranks, failed_grace_s
        self.process = WarmProcess(run_dir / "said", run_stand_ins, *arguments)

    def worker_pids(self) -> list[int]:
        """Wait until all workers are there; return their process ids by rank."""
        files = [self.run_dir / f"pid-{rank}" for rank in range(self.ranks)]
        wait_until(
            lambda: all(file.exists() and file.read_text() for file in files), "all workers"
        )
        return [int(file.read_text()) for file in files]

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """Wait for the launcher; return its exit code and standard error."""
        return self.process.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(name: str, behaviour: str, **more: float) -> Launch:
        launches.append(Launch(name, tmp_path, behaviour, **more))
        return launches[-1]

    yield start
    for launch in launches:
        launch.process.kill()
        for file in tmp_path.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
