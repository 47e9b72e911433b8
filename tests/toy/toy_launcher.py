"""A complete launcher of another package: two ranks on this machine, at a lower priority."""

import subprocess
import sys
import time
from typing import TYPE_CHECKING

from toolkit.errors import PlanError
from toolkit.launcher import Launcher, Program
from toolkit.recipe.section import Count, Section

if TYPE_CHECKING:
    from toolkit.launchers.base import Job, LaunchSpec, Outcome
    from toolkit.launchers.process import StopSignals


class PairSection(Section):
    """The two processes."""

    niceness: Count = 0
    """How far they yield to others."""


class PairStarter:
    def spec(self, job: "Job") -> "LaunchSpec":
        from toolkit.launchers.base import LOOPBACK, LaunchSpec, free_port, worker_env

        if job.cluster.world_size != 2:
            raise PlanError(
                f"launcher pair starts 2 ranks, the recipe has {job.cluster.world_size}",
                fix="cluster.gpus_per_node: 2",
            )
        meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
        sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        yielding = ("nice", "-n", str(job.launch.own(PairSection).niceness))
        return LaunchSpec(
            argv=(*yielding, sys.executable, *job.train),
            run_dir=job.run_dir,
            env={**worker_env(job), **meeting, **sizes},
            rank_env=tuple({"RANK": rank, "LOCAL_RANK": rank} for rank in "01"),
        )

    def run(self, spec: "LaunchSpec", signals: "StopSignals") -> "Outcome":
        from toolkit.launchers.base import Outcome

        ranks = [subprocess.Popen(spec.argv, env=spec.process_env(rank)) for rank in (0, 1)]
        stopping = False
        while any(rank.poll() is None for rank in ranks):
            if signals.stop_requested and not stopping:
                stopping = True
                for rank in ranks:
                    rank.terminate()
            time.sleep(0.05)
        return Outcome(max(rank.returncode for rank in ranks))


PAIR = Launcher(
    "pair",
    "toy_launcher:PairStarter",
    section=PairSection,
    packages={"toy": "toy"},
    programs=(Program("nice", "install coreutils"), Program("pair-top", "pip install toy")),
)
