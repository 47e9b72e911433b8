"""Common parts of all launchers: the job and the launch specification.

A launcher's `Starter` defines what would be started (`spec`, printable, without side effects),
and how it ended (`run`).
"""

import os
import shlex
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from shutil import which
from typing import Protocol

from toolkit.errors import EXIT_DONE, EXIT_FAILED, BackendUnavailable, PlanError
from toolkit.launchers import LAUNCHERS
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection, LaunchSection
from toolkit.registry import load
from toolkit.run.directory import RunDirectory, not_writable
from toolkit.system.atomic import write_atomically
from toolkit.system.interpreter import safe_path
from toolkit.text.redact import redact, secret_variable
from toolkit.text.terminal import tell

RENDEZVOUS_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables of an outer launcher. They would connect the workers to another run."""

NODE_ADDRESS = "DMT_NODE_ADDRESS"
"""Variable with the address by which other machines reach this one, where Ray knows it. They
may not know its name."""
LOOPBACK = "127.0.0.1"
_LOOPBACK_S = 10.0

PORTS = range(20_000, 32_000)
"""Ports below Linux's range for outgoing connections, which could otherwise take one."""


@dataclass(frozen=True)
class Job:
    """The job that a launcher starts."""

    run_dir: Path
    """The run directory, which exists or is written by the workers."""
    cluster: ClusterSection
    launch: LaunchSection = field(default_factory=LaunchSection)
    name: str = "dmt"
    """The recipe's name."""
    recipe: str = ""
    """The recipe as YAML with every decision written out, for workers that start later or
    elsewhere."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the engine needs in every worker."""
    worker: tuple[str, ...] = ()
    """Python arguments instead of `-m toolkit.train RUN_DIR`: a script, or `-m`, a module and
    arguments."""

    @property
    def train(self) -> tuple[str, ...]:
        """Python arguments of every rank if the run directory is written."""
        return self.worker or (*TRAIN_RANK, str(self.run_dir))

    @property
    def recipe_file(self) -> Path:
        """Where `recipe` is kept for workers that plan it again."""
        return RunDirectory(self.run_dir).handed_over


@dataclass(frozen=True)
class Meeting:
    """How the agents of machines that each run `dmt launch` find each other."""

    endpoint: str
    """`HOST:PORT` of one of the machines."""
    name: str
    max_restarts: int
    least: int = 1
    """The run waits until so many machines have come."""
    most: int = 1
    """Further machines wait until one is lost."""
    elastic: bool = False
    """Whether machines may leave and join."""

    @property
    def several(self) -> bool:
        """Whether there may be other machines."""
        return self.most > 1


@dataclass(frozen=True)
class LaunchSpec:
    """The processes to start on this machine."""

    argv: tuple[str, ...]
    """The program and its arguments."""
    run_dir: Path
    """Where the workers find their recipe and plan."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the current environment, without its rendezvous variables."""
    rank_env: tuple[Mapping[str, str], ...] = ({},)
    """One process is started per entry, with these variables in addition to `env`."""
    files: Mapping[Path, str] = field(default_factory=dict)
    """Files to write before anything is started."""
    meeting: Meeting | None = None
    """Meeting of this machine's agent. It gives ranks on several machines their places."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of `rank_env`."""
        return [int(each["RANK"]) for each in self.rank_env]

    def process_env(self, index: int) -> dict[str, str]:
        """Return the whole environment of process `index`."""
        inherited = {k: v for k, v in os.environ.items() if k not in RENDEZVOUS_VARIABLES}
        return {**inherited, **self.env, **self.rank_env[index]}

    def printable(self) -> str:
        """Return the shell commands that would do the same, and the files, except the recipe.
        Secrets are masked."""
        lines = []
        if self.meeting is not None and self.meeting.several:
            lines.append(
                f"# on each machine, after they have met at {self.meeting.endpoint}:\n:"
            )
        for variables in self.rank_env:
            settings = [f"{k}={shlex.quote(v)}" for k, v in {**self.env, **variables}.items()]
            lines.append(" ".join([*settings, shlex.join(self.argv)]))
        recipe = RunDirectory(self.run_dir).handed_over
        files = [
            f"\n# {path}: the resolved recipe"
            if path == recipe
            else f"\n# {path}\n{text.rstrip()}"
            for path, text in self.files.items()
        ]
        return redact("\n".join([" &\n".join(lines), *files]))

    def write_files(self) -> None:
        """Write `files`.

        Raises RecipeError when one cannot be written, PlanError when one holds a secret.
        """
        for path, text in self.files.items():
            if redact(text) != text:
                raise PlanError(
                    f"{path} would hold a secret of this environment",
                    fix="take it out of the recipe: workers get it by their environment",
                )
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text)
            except OSError as error:
                raise not_writable(path, error) from error


class Starter(Protocol):
    """Starts the workers of a run on the machines of a cluster."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return what `run` starts.

        Raises PlanError when this launcher cannot serve the job, BackendUnavailable when
        its program is missing.
        """
        ...

    def run(self, spec: LaunchSpec, signals: StopSignals) -> int:
        """Start it, wait, leave no process behind, report why it failed. Return the exit
        code, one of errors.py.

        A launcher that hands a job to a scheduler does not wait. The caller has written
        the spec's files and entered `signals`, in the main thread. Each of STOP_SIGNALS
        reaches every worker once, as SIGTERM. The third SIGINT kills.
        """
        ...


def starter(launcher: str) -> Starter:
    """The starter of a launcher, by the launcher's name."""
    made: Starter = load(LAUNCHERS[launcher].starter)()
    return made


DMT = ("-m", "toolkit.cli.main")
"""The command `dmt` as Python arguments."""
TRAIN_RANK = ("-m", "toolkit.train")
"""The Python arguments of a rank, before its run directory or recipe."""


_OF_THIS_MACHINE = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH")
_SETTINGS = (
    *("CUBLAS_", "CUDA_", "GLOO_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_"),
    *("UCX_", "DMT_", "DS_ACCELERATOR", "HF_", "LD_LIBRARY_PATH", "PYTHONPATH"),
    *("MLFLOW_", "REPLICA_GROUP_ID", "TORCHFT_", "WANDB_"),
)
"""Prefixes of variables that change how ranks compute, communicate and report."""


def settings_here() -> dict[str, str]:
    """Variables of this environment that ranks on other machines need. Secrets are left out."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_SETTINGS)
        and name not in _OF_THIS_MACHINE
        and not secret_variable(name)
    }


def worker_env(job: Job) -> dict[str, str]:
    """Return the variables that every worker needs under any launcher.

    Threads are divided between the machine's processes unless the user set them: PyTorch
    would give each process all cores, and they would slow each other down.
    """
    env = dict(job.env)
    if safe_path():
        env["PYTHONSAFEPATH"] = "1"
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        env["OMP_NUM_THREADS"] = str(max(1, cores // job.cluster.gpus_per_node))
    if job.cluster.gpu == "cpu":
        # Hides GPUs, of which there may be fewer than ranks.
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return env


def submit(launcher: str, spec: LaunchSpec, fix: str) -> int:
    """Hand a job to a scheduler's program. Returns when it is accepted or refused: EXIT_DONE or
    EXIT_FAILED. Raises BackendUnavailable if the launcher's program is not on this machine."""
    program = spec.argv[0]
    if which(program) is None:
        raise BackendUnavailable(
            f"launch.launcher is {launcher}, but there is no `{program}` here", fix=fix
        )
    done = subprocess.run(spec.argv, env=spec.process_env(0), check=False)
    if done.returncode:
        tell(f"error: {program} ended with code {done.returncode}; its message is above")
    return EXIT_FAILED if done.returncode else EXIT_DONE


def check_loopback() -> None:
    """Raise BackendUnavailable unless this machine's processes can connect at the ranks'
    meeting address. Otherwise they would try for minutes without an error."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S).close()
    except OSError as error:
        raise BackendUnavailable(
            f"the ranks meet at {LOOPBACK}, where nothing can connect: {error}",
            fix="start the loopback device (`ip link set lo up`); let no firewall block it",
        ) from error


def free_port() -> int:
    """Return a free TCP port."""
    random = SystemRandom()
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
