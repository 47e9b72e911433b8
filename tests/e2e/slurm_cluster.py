"""A real Slurm on this machine: a controller and two nodes, as this user, on free ports."""

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.needs import SEARCH_PATH
from tests.processes import HANG_S, wait_until
from toolkit.launchers.base import free_port

LOST_S = 30
"""After which Slurm takes a silent node for lost."""
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SlurmdTimeout={lost_s}
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName={host}-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
"""


class Slurm:
    """Commands to the cluster."""

    def __init__(self, folder: Path, host: str, env: dict[str, str]) -> None:
        self.nodes = (host, f"{host}-2")
        self.env = env
        """What a user of it has in the environment."""
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *daemon: str) -> subprocess.Popen[bytes]:
        """Start a daemon, e.g. one of `slurmd`."""
        with (self._folder / f"{daemon[0]}.out").open("a") as output:
            process = subprocess.Popen(
                daemon,
                env={**os.environ, **self.env},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def start_node(self, node: str) -> None:
        """Start a node's daemon, and wait until the controller has noticed."""
        before = self._boot(node)
        self.start("slurmd", "-D", "-N", node)
        wait_until(lambda: self._boot(node) != before, f"{node} to register")

    def _boot(self, node: str) -> str:
        """When its daemon started; empty before the controller answers."""
        words = self._try("scontrol", "show", "node", node).split()
        return next((word for word in words if word.startswith("SlurmdStartTime=")), "")

    def lose(self, node: str) -> None:
        """Kill a node's daemon and all that runs there."""
        lost = [one for one in psutil.process_iter() if self._runs_on(node, one)]
        for process in lost:
            with suppress(psutil.Error):
                process.kill()

    def _runs_on(self, node: str, process: psutil.Process) -> bool:
        """Whether a process is a task on a node, the step above it, or the node's daemon."""
        with suppress(psutil.Error):
            below = process.children() if process.name() == "slurmstepd" else []
            for env in (one.environ() for one in (process, *below)):
                if env.get("SLURM_CONF") == self.env["SLURM_CONF"]:
                    daemon = process.cmdline()[-2:] == ["-N", node]
                    return daemon or env.get("SLURMD_NODENAME") == node
        return False

    def idle(self) -> set[str]:
        """Nodes without a job."""
        return set(self._try("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())

    def _run(
        self, command: tuple[str, ...], folder: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            env={**os.environ, **self.env},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    def _try(self, *command: str) -> str:
        """The output of a command, also of one that fails."""
        return self._run(command).stdout

    def end(self) -> None:
        """Leave no daemon behind."""
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            process.wait(HANG_S)

    def ask(self, *command: str, folder: Path | None = None) -> str:
        """Run a command of a user of the cluster; its output."""
        done = self._run(command, folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """E.g. RUNNING, PENDING, COMPLETED."""
        text = self.ask("scontrol", "show", "job", job, "--oneliner")
        return text.split("JobState=")[1].split()[0]


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Start it, wait until both nodes are idle, and leave no process behind."""
    host = socket.gethostname().split(".")[0]
    (folder / "state").mkdir()
    names = {"controller": free_port(), "first": free_port(), "second": free_port()}
    user = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    conf = folder / "slurm.conf"
    places = {"host": host, "folder": folder, "lost_s": LOST_S}
    conf.write_text(CONF.format(user=user, **places, **names))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    folder.chmod(0o755)
    # Both nodes have the same cores.
    env = {"SLURM_CONF": str(conf), "PATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    options = {"socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log"}
    paths = [f"--{name}={folder / file}" for name, file in options.items()]
    munged = ("munged", "--foreground", "--force", f"--key-file={key}", *paths)
    slurm = Slurm(folder, host, env)
    try:
        slurm.start(*munged, f"--seed-file={folder / 'munge.seed'}")
        wait_until((folder / "munge.sock").exists, "munged")
        slurm.start("slurmctld", "-D")
        wait_until(lambda: "SlurmdStartTime" in slurm._boot(host), "slurmctld")
        for node in slurm.nodes:
            slurm.start_node(node)
        wait_until(lambda: slurm.idle() == {*slurm.nodes}, "two idle nodes")
        yield slurm
        subprocess.run(["scancel", "--user", user], env={**os.environ, **env}, timeout=HANG_S)
        wait_until(lambda: not slurm.ask("squeue", "-h"), "an empty queue")
    finally:
        slurm.end()
