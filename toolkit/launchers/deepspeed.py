"""`deepspeed`: DeepSpeed's launcher, on this machine."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from toolkit.errors import BackendUnavailable, PlanError
from toolkit.launchers.base import LaunchSpec, Outcome, common_env, free_port, worker_command
from toolkit.launchers.foreign import run_guarded
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection


class DeepSpeedLauncher:
    """The `deepspeed` command, with nothing left to its defaults that could surprise."""

    def spec(
        self, run_dir: Path, cluster: ClusterSection, worker: Sequence[str] | None = None
    ) -> LaunchSpec:
        """Return the command; see Launcher."""
        if cluster.nodes > 1:
            raise PlanError(
                f"launch.launcher: deepspeed starts one machine here, but cluster.nodes is "
                f"{cluster.nodes}",
                fix="start `deepspeed --hostfile FILE … launch/train.py RECIPE`, or "
                "cluster.nodes: 1",
            )
        processes = cluster.gpus_per_node
        tail = tuple(worker or worker_command(run_dir))
        return LaunchSpec(
            argv=(
                _program(),
                # A forgotten default hostfile would send the run to other machines.
                "--hostfile=/dev/null",
                *_devices(cluster),
                f"--master_port={free_port()}",
                # Workers read their rank from the environment, as under any launcher.
                "--no_local_rank",
                *(("--module", *tail[1:]) if tail[0] == "-m" else tail),
            ),
            run_dir=run_dir,
            env=common_env(cluster, processes),
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start it and wait; see Launcher."""
        return run_guarded(spec, signals)


def _program() -> str:
    """Return the command that belongs to this Python, else one of the search path."""
    beside = Path(sys.executable).with_name("deepspeed")
    program = str(beside) if beside.exists() else which("deepspeed")
    if program is None:
        raise BackendUnavailable(
            "launch.launcher is deepspeed, but there is no `deepspeed` command",
            fix="pip install deepspeed, or launch.launcher: local",
        )
    return program


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
