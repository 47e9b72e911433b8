"""`torchrun`: PyTorch's elastic launcher, one agent on this machine."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.errors import BackendUnavailable, PlanError
from toolkit.launchers.base import LaunchSpec, Outcome, common_env, worker_command
from toolkit.launchers.foreign import run_guarded
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection


class TorchrunLauncher:
    """`python -m torch.distributed.run --standalone`: it picks a free port itself."""

    def spec(
        self, run_dir: Path, cluster: ClusterSection, worker: Sequence[str] | None = None
    ) -> LaunchSpec:
        """Return the agent's command; see Launcher."""
        if cluster.nodes > 1:
            raise PlanError(
                f"launch.launcher: torchrun starts one machine here, but cluster.nodes is "
                f"{cluster.nodes}",
                fix="start `torchrun --nnodes N --rdzv-endpoint HOST:PORT … launch/train.py "
                "RECIPE` on every machine, or cluster.nodes: 1",
            )
        if importlib.util.find_spec("torch") is None:
            raise BackendUnavailable("torchrun: torch is missing", fix="pip install torch")
        processes = cluster.gpus_per_node
        return LaunchSpec(
            argv=(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={processes}",
                *(worker or worker_command(run_dir)),
            ),
            run_dir=run_dir,
            env=common_env(cluster, processes),
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start the agent, without its traceback, and wait; see Launcher."""
        python, _, _, *arguments = spec.argv
        quiet = (python, "-m", "toolkit.launchers.quiet_torchrun", *arguments)
        return run_guarded(replace(spec, argv=quiet), signals)
