"""`ray`: a Ray Train job whose workers are the ranks; Ray restarts failed ones."""

import importlib.util

from toolkit.errors import BackendUnavailable
from toolkit.extras.launchers.ray import RaySection
from toolkit.launchers.base import Job, LaunchSpec, Outcome, spec_of
from toolkit.launchers.foreign import run_remote
from toolkit.launchers.process import StopSignals
from toolkit.system.interpreter import python


class RayStarter:
    """The driver `toolkit.extras.launchers.ray_job`, on this machine."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the driver's command; see Starter."""
        if importlib.util.find_spec("ray") is None:
            raise BackendUnavailable(
                "launch.launcher is ray, which is not installed", fix="pip install 'ray[train]'"
            )
        elastic, per_node = job.launch.elastic, job.cluster.gpus_per_node
        ranks = [job.cluster.world_size]
        if elastic is not None:
            ranks = [elastic.min_nodes * per_node, elastic.max_nodes * per_node]
        options = {
            "--recipe": str(job.recipe_file),
            "--run-dir": str(job.run_dir),
            "--ranks": ":".join(map(str, ranks)),
            "--max-failures": str(job.launch.max_restarts),
        }
        words = [word for pair in options.items() for word in pair]
        if job.cluster.gpu != "cpu":
            words.append("--gpu")
        address = job.launch.own(RaySection).address
        if address is not None:
            words += ["--address", address]
        return spec_of(
            job,
            (*python(), "-m", "toolkit.extras.launchers.ray_job", *words),
            env={"RAY_USAGE_STATS_ENABLED": "0"},
            files={job.recipe_file: job.recipe},
            remote=True,
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start the driver and wait; see Starter."""
        return run_remote(spec, signals, restarts=True)
