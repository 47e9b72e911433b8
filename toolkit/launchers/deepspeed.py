"""`deepspeed`: DeepSpeed's launcher, on this machine or on those of a hostfile."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from shutil import which

from toolkit.errors import EXIT_DONE, BackendUnavailable, PlanError
from toolkit.launchers import DEEPSPEED
from toolkit.launchers.base import (
    Job,
    LaunchSpec,
    Outcome,
    free_port,
    settings_here,
    spec_of,
    worker_env,
)
from toolkit.launchers.foreign import run_guarded, run_remote
from toolkit.launchers.hostfile import check_address, hosts_of, read_hostfile
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection
from toolkit.system.interpreter import program
from toolkit.text.redact import secret_variable

_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
"""Characters that need no quoting in a shell: DeepSpeed passes its command to shells
unquoted."""
_SSH = (
    "-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
)
"""By default, ssh waits indefinitely for an unreachable machine."""


class DeepSpeedStarter:
    """The `deepspeed` command, with explicit values for surprising defaults."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the command; see Starter."""
        if job.cluster.nodes > 1:
            return _on_several(job)
        module = ("--module", *job.train[1:]) if job.train[0] == "-m" else job.train
        return spec_of(
            job,
            (
                _program("deepspeed"),
                # A forgotten default hostfile would send the run to other machines.
                "--hostfile=/dev/null",
                *_devices(job.cluster),
                f"--master_port={free_port()}",
                # Workers read their rank from the environment, as under any launcher.
                "--no_local_rank",
                *module,
            ),
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start it and wait; see Starter."""
        if not spec.remote:
            return run_guarded(spec, signals)
        if "--launcher=pdsh" not in spec.argv:
            return run_remote(spec, signals)
        _reach_by_ssh(spec)
        outcome = run_remote(spec, signals)
        if outcome.exit_code != EXIT_DONE:
            _end_by_ssh(spec)
        return outcome


def _on_several(job: Job) -> LaunchSpec:
    """The command that starts the ranks of all machines of the hostfile."""
    hosts = hosts_of(job)
    runner = job.launch.remote_start
    _check_programs(runner)
    _check_paths(job)
    address, port = check_address(hosts[0]), str(free_port())
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port}
    variables = {**_users_file(), **_settings_here(), **worker_env(job), **meeting}
    if runner == "slurm" and (cut := [k for k, v in variables.items() if "," in v]):
        raise PlanError(
            f"{cut[0]} has a comma, at which srun cuts the variables that it passes on",
            fix=f"unset {cut[0]}, or launch.remote_start: pdsh",
        )
    ssh = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    exported = job.run_dir / "launch" / "deepspeed.env"
    per_node = f"--launcher_args=--ntasks-per-node={job.cluster.gpus_per_node}"
    # Slurm would place the ranks as it likes.
    placing = (f"--num_nodes={job.cluster.nodes}", per_node) if runner == "slurm" else ()
    return spec_of(
        job,
        (
            _program("deepspeed"),
            f"--hostfile={job.launch.hostfile}",
            f"--launcher={runner}",
            f"--master_addr={address}",
            f"--master_port={port}",
            # DeepSpeed's own check ends in a traceback, and ignores pdsh's options for ssh.
            "--no_ssh_check",
            "--no_local_rank",
            *placing,
            # As a script: under Slurm, DeepSpeed ignores that the program is a module.
            *(_program("dmt"), "train", str(job.run_dir)),
        ),
        env={
            # Where DeepSpeed reads what to set on the other machines.
            "DS_ENV_FILE": str(exported),
            "PDSH_SSH_ARGS_APPEND": f"{_SSH} {ssh}".strip(),
        },
        files={exported: "".join(f"{name}={value}\n" for name, value in variables.items())},
        remote=True,
        # At SIGTERM its runner for pdsh ends every DeepSpeed run of this user there.
        end_signal=signal.SIGKILL if runner == "pdsh" else signal.SIGTERM,
        # DeepSpeed itself puts these into the command line, which all users can read.
        hidden=frozenset(
            name
            for name in os.environ
            if name.startswith(("MLFLOW", "PYTHON")) and secret_variable(name)
        ),
    )


def _check_programs(runner: str) -> None:
    """Raises BackendUnavailable if the program that starts processes on other machines is
    missing."""
    for needed in DEEPSPEED.remote_programs[runner]:
        if which(needed.name) is None:
            on_debian, _, _ = needed.install.partition("),")
            raise BackendUnavailable(
                f"launch.remote_start is {runner}, but there is no `{needed.name}` here",
                fix=f"{on_debian}), or another remote_start",
            )


def _check_paths(job: Job) -> None:
    """Raises PlanError for a path that would need quoting in a shell."""
    places = {
        "the run directory": job.run_dir,
        "this folder": Path.cwd(),
        "Python": Path(sys.executable),
    }
    for what, path in places.items():
        if not _PLAIN.fullmatch(str(path)):
            raise PlanError(
                f"{what} is {str(path)!r}, and DeepSpeed gives it to a shell unquoted",
                fix="a path of letters, digits and `_@%+=:,./-`, or --launcher torchrun",
            )


def _users_file() -> dict[str, str]:
    """The content of the user's `.deepspeed_env`, which ours replaces."""
    found: dict[str, str] = {}
    for folder in (Path.home(), Path.cwd()):
        file = folder / ".deepspeed_env"
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines()
            found |= dict(line.split("=", 1) for line in lines if "=" in line)
    return found


def _settings_here() -> dict[str, str]:
    """`settings_here`, which is visible in the command line of ssh.

    Raises PlanError for a value that a shell would interpret.
    """
    chosen = settings_here()
    for name, value in chosen.items():
        if value and not _PLAIN.fullmatch(value):
            raise PlanError(
                f"{name} is {value!r}, and DeepSpeed gives it to a shell unquoted",
                fix=f"unset {name}, or set it on the machines themselves",
            )
    return chosen


def _on_all(spec: LaunchSpec, *command: str) -> "dict[str, subprocess.Popen[str]]":
    """Start a command on every machine of the hostfile, by ssh."""
    (hostfile,) = (word for word in spec.argv if word.startswith("--hostfile="))
    options = shlex.split(spec.env["PDSH_SSH_ARGS_APPEND"])
    return {
        host: subprocess.Popen(
            ["ssh", *options, host, *command],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host, *_ in read_hostfile(Path(hostfile.partition("=")[2]))
    }


def _end_by_ssh(spec: LaunchSpec) -> None:
    """Terminate the remaining ranks of this run only."""
    # The brackets keep the pattern from matching the shell that carries it.
    pattern = "[t]rain." + re.sub(r"[^\w/-]", ".", str(spec.run_dir)) + "$"
    for one in _on_all(spec, "pkill", "-TERM", "-f", f"'{pattern}'").values():
        one.communicate()


def _reach_by_ssh(spec: LaunchSpec) -> None:
    """Raise BackendUnavailable naming the machines of the hostfile that ssh does not reach."""
    tries = _on_all(spec, "true")
    why = {host: one.communicate()[1].strip() for host, one in tries.items()}
    lost = [host for host, one in tries.items() if one.returncode]
    if lost:
        reasons = "; ".join(f"{host}: {why[host].rpartition(chr(10))[2]}" for host in lost)
        raise BackendUnavailable(
            f"not reached by ssh: {reasons}",
            fix=f"`ssh {shlex.quote(lost[0])} true` must work without a question; options for "
            "ssh go into PDSH_SSH_ARGS_APPEND",
        )


def _program(name: str) -> str:
    path = program(name)
    if path is None:
        raise BackendUnavailable(
            f"launch.launcher is deepspeed, but there is no `{name}` command",
            fix=f"pip install {name}, or launch.launcher: local",
        )
    return path


def _devices(cluster: ClusterSection) -> tuple[str, ...]:
    """Return the flag that chooses devices; CUDA_VISIBLE_DEVICES keeps its meaning.

    `--num_gpus N` alone would take devices 0 … N-1 whatever that variable says.
    """
    count = cluster.gpus_per_node
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if cluster.gpu == "cpu" or not visible:
        return (f"--num_gpus={count}",)
    devices = visible.split(",")
    if not all(device.strip().isdecimal() for device in devices) or len(devices) < count:
        raise PlanError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, cluster.gpus_per_node is {count}; the "
            f"deepspeed launcher needs at least {count} device numbers there",
            fix="list device numbers (0,1,…), unset it, or launch.launcher: local",
        )
    return (f"--include=localhost:{','.join(d.strip() for d in devices[:count])}",)
