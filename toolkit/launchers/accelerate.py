"""`accelerate`: Accelerate's launcher, on this machine."""

import importlib.util
import sys
from dataclasses import replace

from toolkit.errors import BackendUnavailable
from toolkit.launchers.base import (
    Job,
    LaunchSpec,
    Outcome,
    free_port,
    on_several_machines,
    one_machine,
    spec_of,
)
from toolkit.launchers.foreign import run_guarded
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection
from toolkit.system.interpreter import TRAIN

_LONE_RANK = (
    *("RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "LOCAL_WORLD_SIZE=1"),
    "MASTER_ADDR=127.0.0.1",
)


class AccelerateStarter:
    """`accelerate launch`, which only starts processes here: the engine is the recipe's."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the command; raises PlanError for more than one machine. See Starter."""
        one_machine(
            job,
            "accelerate",
            "on every machine: accelerate launch --config_file FILE --machine_rank K "
            f"{TRAIN} RECIPE, with FILE of `dmt render --to accelerate`; or "
            f"{on_several_machines()}",
        )
        if importlib.util.find_spec("accelerate") is None:
            raise BackendUnavailable(
                "launch.launcher is accelerate, which is not installed",
                fix="pip install accelerate, or launch.launcher: local",
            )
        config = job.run_dir / "launch" / "accelerate.yaml"
        # For one process, Accelerate sets no rank, which the guard needs to find the worker.
        place = (*_LONE_RANK, f"MASTER_PORT={free_port()}")
        alone = ("--no_python", "env", *place, sys.executable)
        worker = (*alone, *job.train) if job.cluster.gpus_per_node == 1 else job.train
        return spec_of(
            job,
            (
                *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"),
                *("--config_file", str(config), *worker),
            ),
            # A file, because otherwise a stray default_config.yaml would be read.
            files={config: _config(job.cluster)},
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start it, without its traceback, and wait; see Starter."""
        python, _, _, _, *arguments = spec.argv
        # Accelerate's own --quiet is for the single process, which has no agent.
        quiet = ("-m", "toolkit.launchers.quiet_agent", "accelerate", "--quiet")
        return run_guarded(replace(spec, argv=(python, *quiet, *arguments)), signals)


def _config(cluster: ClusterSection) -> str:
    processes = cluster.gpus_per_node
    # MULTI_GPU on processors, too: MULTI_CPU starts one process silently.
    kind = "'NO'" if processes == 1 else "MULTI_GPU"
    return f"""\
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
use_cpu: {str(cluster.gpu == "cpu").lower()}
num_machines: 1
num_processes: {processes}
main_process_port: {free_port()}
mixed_precision: 'no'
"""
