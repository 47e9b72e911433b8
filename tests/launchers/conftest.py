"""Starting a launcher in a process of its own, and looking at what it leaves behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.launchers.watching import STAND_IN
from tests.processes import HANG_S, wait_until

_LAUNCH = """
import sys
from pathlib import Path
from toolkit.launchers.base import Job, starter
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection, LaunchSection

name, run_dir, ranks, grace_s, *worker = sys.argv[1:]
chosen = starter(name)
cluster = ClusterSection(gpus_per_node=int(ranks))
launch = LaunchSection(grace_s=float(grace_s) or None)
spec = chosen.spec(Job(Path(run_dir), cluster, launch, worker=tuple(worker)))
spec.write_files()
with StopSignals() as signals:
    outcome = chosen.run(spec, signals)
sys.exit(outcome.exit_code)
"""


class Launch:
    """A launcher process with stand-in workers."""

    def __init__(
        self,
        name: str,
        run_dir: Path,
        behaviour: str,
        ranks: int,
        grace_s: float,
        inside: Sequence[str],
    ) -> None:
        self.run_dir = run_dir
        self.ranks = ranks
        argv = [name, run_dir, ranks, grace_s, STAND_IN, run_dir, behaviour]
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-c", _LAUNCH, *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell's foreground job: its own process group, which Ctrl-C signals.
            process_group=0,
        )

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
        _, errors = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, errors


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(
        name: str,
        behaviour: str,
        ranks: int = 2,
        grace_s: float = 0,
        inside: Sequence[str] = (),
    ) -> Launch:
        launches.append(Launch(name, tmp_path, behaviour, ranks, grace_s, inside))
        return launches[-1]

    yield start
    for launch in launches:
        if launch.process.poll() is None:
            launch.process.kill()
        launch.process.communicate()
        for file in tmp_path.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
