"""`local`: an agent on this machine starts one process per rank (agent.py).

On several machines, `dmt launch` runs on each. They meet at `launch.rendezvous`.
"""

import sys

from toolkit.errors import PlanError
from toolkit.launchers.base import (
    LOOPBACK,
    TRAIN_RANK,
    Job,
    LaunchSpec,
    Meeting,
    check_loopback,
    free_port,
    worker_env,
)
from toolkit.launchers.process import StopSignals


class LocalStarter:
    """One process per rank, each with its rank in the environment.

    Rank 0 has the terminal. The output of other ranks goes to logs/rank-N.log. If one rank
    fails, the others are terminated, and killed after FAILED_GRACE_S. If the launcher is
    killed, the kernel kills the ranks.
    """

    def spec(self, job: Job) -> LaunchSpec:
        """Return one process per rank of this machine. Raises PlanError for several machines
        that have no meeting point."""
        ranks = range(job.cluster.gpus_per_node)
        if job.launch.most_nodes(job.cluster.nodes) > 1:
            planning = (str(job.recipe_file), "--run-dir", str(job.run_dir))
            return LaunchSpec(
                (sys.executable, "-u", *TRAIN_RANK, *planning),
                job.run_dir,
                env=worker_env(job),
                rank_env=tuple({"LOCAL_RANK": str(rank)} for rank in ranks),
                files={job.recipe_file: job.recipe},
                meeting=_meeting(job),
            )
        rendezvous = {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
        }
        return LaunchSpec(
            (sys.executable, "-u", *job.train),
            job.run_dir,
            env={**worker_env(job), **rendezvous},
            rank_env=tuple({"RANK": str(r), "LOCAL_RANK": str(r)} for r in ranks),
            meeting=Meeting(f"{LOOPBACK}:0", job.name, job.launch.max_restarts),
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> int:
        """Start all ranks and wait for them. See Starter. Raises as `check_loopback` does."""
        assert spec.meeting is not None, "as `spec` states it"
        if not spec.meeting.several:
            check_loopback()
        from toolkit.launchers.agent import run_agent  # imports torch

        return run_agent(spec, spec.meeting, signals)


def _meeting(job: Job) -> Meeting:
    """How the machines of a job meet."""
    launch, nodes = job.launch, job.cluster.nodes
    if launch.rendezvous is None:
        raise PlanError(
            f"launch.rendezvous: nothing, but cluster.nodes is {nodes}",
            fix="on every machine, with the name of one of them: "
            "--set launch.rendezvous=HOST:29400; or cluster.nodes: 1",
        )
    elastic = launch.elastic
    least, most = (elastic.min_nodes, elastic.max_nodes) if elastic else (nodes, nodes)
    restarts, changes = launch.max_restarts, elastic is not None
    return Meeting(launch.rendezvous, job.name, restarts, least, most, changes)
