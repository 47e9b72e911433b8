"""`mpi`: one command starts a process for every device of all machines, as for Horovod.

Open MPI, MPICH and Intel MPI share the few options that are used here. Ranks get their
variables by `env`, which each of them passes on, and read their numbers from those of the MPI
(engines/scheduler_ranks.py); they exchange data by torch.distributed, not by MPI.
"""

import shlex

from toolkit.extras.launchers.mpi import MPI, MpiSection
from toolkit.launchers.base import (
    DMT,
    LOOPBACK,
    Job,
    LaunchSpec,
    Outcome,
    free_port,
    settings_here,
    worker_env,
)
from toolkit.launchers.foreign import require_program, run_remote
from toolkit.launchers.hostfile import check_address, hosts_of
from toolkit.launchers.process import ORPHAN_GRACE_S, StopSignals
from toolkit.system.interpreter import python

_KILL_AFTER = {"OMPI_MCA_odls_base_sigkill_timeout": f"{ORPHAN_GRACE_S / 2:.0f}"}
"""Open MPI would end the other ranks 1 s after the first one has left, saved or failed, and
kill them 1 s later: it waits so long twice, on each machine, whether or not ranks are left."""


class MpiStarter:
    """`mpirun`."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the command, and a script for other ways to start it, in which rank 0 plans;
        see Starter."""
        mpi, cluster = job.launch.own(MpiSection), job.cluster
        hosts, address = ["localhost"], LOOPBACK
        variables = worker_env(job)
        if cluster.nodes > 1:
            hosts = hosts_of(job)
            address = check_address(hosts[0])
            variables = {**settings_here(), **variables}
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
        each = cluster.gpus_per_node
        start = (
            mpi.command,
            *("--host", ",".join(f"{host}:{each}" for host in hosts)),
            *("-np", str(each * cluster.nodes)),
            *("--bind-to", "none"),  # otherwise all threads of a rank share one core
            *mpi.options,
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(*python(), "-u"),
        )
        planning = (*DMT, "train", str(job.recipe_file), "--run-dir", str(job.run_dir))
        script = f"#!/bin/sh\nexec {shlex.join((*start, *planning))}\n"
        return LaunchSpec(
            (*start, *job.train),
            job.run_dir,
            env=_KILL_AFTER,
            grace_s=job.grace_s,
            files={job.recipe_file: job.recipe, job.run_dir / "launch" / "mpi.sh": script},
            remote=True,
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start it and wait; see Starter. Raises BackendUnavailable without the program."""
        install = f"{MPI.programs[0].install}; or launch.mpi.command: PATH"
        require_program("mpi", spec, install)
        return run_remote(spec, signals)
