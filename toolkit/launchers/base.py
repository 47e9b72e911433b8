"""What every launcher shares: the launch specification, its environment, its outcome.

A launcher answers two questions: what would be started (`spec`, printable, with no side
effect), and how did it end (`run`).
"""

import math
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Protocol

from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection
from toolkit.redact import redact

RENDEZVOUS_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Left by a launcher around this one, they would send the workers to another run."""

_PORTS = range(20_000, 32_000)
"""Below Linux's range for outgoing connections, so that none of these takes the port."""


@dataclass(frozen=True)
class LaunchSpec:
    """What is started on this machine."""

    argv: tuple[str, ...]
    """The program and its arguments."""
    run_dir: Path
    """Where the workers find their recipe and plan."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set on top of the present environment, in which no rendezvous variable is left."""
    rank_env: tuple[Mapping[str, str], ...] = ({},)
    """One process is started per entry, with these variables on top of `env`."""
    grace_s: float = math.inf
    """How long ranks may take to save and leave when asked to; they are killed then."""

    def process_env(self, index: int) -> dict[str, str]:
        """Return the whole environment of process `index`."""
        inherited = {k: v for k, v in os.environ.items() if k not in RENDEZVOUS_VARIABLES}
        return {**inherited, **self.env, **self.rank_env[index]}

    def printable(self) -> str:
        """Return the shell commands that would do the same, secrets masked."""
        lines = []
        for variables in self.rank_env:
            settings = [f"{k}={shlex.quote(v)}" for k, v in {**self.env, **variables}.items()]
            lines.append(" ".join([*settings, shlex.join(self.argv)]))
        return redact(" &\n".join(lines))


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    exit_code: int
    """One of errors.py."""
    reason: str = ""
    """Why it failed, in one line."""


class Launcher(Protocol):
    """Starts the workers of a run on the machines of a cluster."""

    def spec(
        self, run_dir: Path, cluster: ClusterSection, worker: Sequence[str] | None = None
    ) -> LaunchSpec:
        """Return what `run` starts.

        `worker` is what Python runs: a script, or `-m` and a module, with its arguments;
        default `worker_command(run_dir)`. Raises PlanError when this launcher cannot
        serve the cluster, BackendUnavailable when its program is missing.
        """
        ...

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start it, wait, leave no process behind, tell the user why it failed.

        The caller has entered `signals`, in the main thread. SIGINT, SIGTERM and SIGUSR1
        are passed on to every worker once; the third SIGINT kills.
        """
        ...


def worker_command(run_dir: Path) -> tuple[str, ...]:
    """Return what Python runs on every rank."""
    return ("-m", "toolkit.cli.main", "train", str(run_dir))


def common_env(cluster: ClusterSection, processes: int) -> dict[str, str]:
    """Return the variables that every worker needs, whatever starts it.

    Threads are divided between the machine's processes unless the user set them: PyTorch
    would give each process all cores, and they would slow each other down.
    """
    env = {}
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        env["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    if cluster.gpu == "cpu":
        env["DS_ACCELERATOR"] = "cpu"
    return env


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    random = SystemRandom()
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def tell(message: str) -> None:
    """Show one message on standard error."""
    print(redact(message), file=sys.stderr, flush=True)
