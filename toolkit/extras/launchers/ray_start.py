"""`ray`: a Ray Train job whose workers are the ranks; Ray restarts failed ones."""

import importlib.util

from toolkit.errors import BackendUnavailable
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
        driver = (*python(), "-m", "toolkit.extras.launchers.ray_job")
        return spec_of(
            job,
            (*driver, str(job.recipe_file), str(job.run_dir)),
            env={"RAY_USAGE_STATS_ENABLED": "0"},
            files={job.recipe_file: job.recipe},
            remote=True,
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start the driver and wait; see Starter."""
        return run_remote(spec, signals, restarts=True)
