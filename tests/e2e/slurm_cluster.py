"""A real Slurm on this machine: a controller and two nodes, as this user, on free ports."""

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import SEARCH_PATH
from tests.processes import HANG_S, wait_until
from toolkit.launchers.base import free_port

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

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        """What a user of it has in the environment."""

    def ask(self, *command: str, folder: Path | None = None) -> str:
        """Run a command of a user of the cluster; its output."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.env},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
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
    conf.write_text(CONF.format(host=host, folder=folder, user=user, **names))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    folder.chmod(0o755)
    # Both nodes have the same cores.
    env = {"SLURM_CONF": str(conf), "PATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    options = {"socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log"}
    paths = [f"--{name}={folder / file}" for name, file in options.items()]
    daemons = (
        ["munged", "--foreground", "--force", f"--key-file={key}", *paths,
         f"--seed-file={folder / 'munge.seed'}"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
        ["slurmd", "-D", "-N", f"{host}-2"],
    )  # fmt: skip
    slurm, running = Slurm(env), []
    try:
        for daemon in daemons:
            with (folder / f"{daemon[0]}.out").open("a") as output:
                running.append(
                    subprocess.Popen(
                        daemon,
                        env={**os.environ, **env},
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
            if daemon[0] == "munged":
                wait_until((folder / "munge.sock").exists, "munged")
        wait_until(lambda: _idle(slurm) == 2, "two idle nodes")
        yield slurm
        subprocess.run(["scancel", "--user", user], env={**os.environ, **env}, timeout=HANG_S)
        wait_until(lambda: not slurm.ask("squeue", "-h"), "an empty queue")
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(HANG_S)


def _idle(slurm: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"],
        env={**os.environ, **slurm.env},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    return len(set(done.stdout.split()))
