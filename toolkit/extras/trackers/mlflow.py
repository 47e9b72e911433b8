"""MLflow: a tracking server, or a database on this machine."""

import re
import time
from collections.abc import Mapping
from typing import ClassVar

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE
from toolkit.text.dotted import leaves
from toolkit.track.trackers.base import Rows, TrackedRun, Tracker

_OWN_ID = "dmt.run_id"
"""Tag that identifies a run; MLflow assigns its own id."""
_FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""In the names of metrics and parameters."""
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER = 1000, 100, 500
"""Of one request; letters of a parameter that every server takes."""


class MlflowTracker(Tracker):
    """A run of MLflow, through its client: nothing of the machine or the user is recorded."""

    title = "MLflow"
    extra = "mlflow"
    packages: ClassVar[Mapping[str, tuple[str, str]]] = {
        "mlflow-skinny": ("mlflow", ""),
        "sqlalchemy": ("sqlalchemy", "with a database of its own"),
        "alembic": ("alembic", "with a database of its own"),
    }
    not_inherited = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME")
    environment: ClassVar[Mapping[str, str]] = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }

    def start(self, run: TrackedRun) -> Mapping[str, int]:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=run.settings["tracking_uri"])
        experiment = self._experiment(run.settings["experiment"])
        # The name of a run is a tag of MLflow's own, as is its user, which is not stated.
        found = self._client.search_runs([experiment], f"tags.`{_OWN_ID}` = '{run.run_id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {_OWN_ID: run.run_id}
            self._id = self._client.create_run(
                experiment, tags=tags, run_name=run.name
            ).info.run_id
            parameters = [
                Param(_FORBIDDEN.sub("_", key), str(value)[:_LONGEST_PARAMETER])
                for key, value in leaves(run.config)
            ]
            for at in range(0, len(parameters), _MOST_PARAMETERS):
                some = parameters[at : at + _MOST_PARAMETERS]
                self._client.log_batch(self._id, params=some)
        names = self._client.get_run(self._id).data.metrics
        return {name: self._newest(name) for name in names}

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        try:
            return str(found.experiment_id if found else self._client.create_experiment(name))
        except MlflowException:  # another run has created it meanwhile
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _newest(self, name: str) -> int:
        return max(int(one.step) for one in self._client.get_metric_history(self._id, name))

    def spelled(self, name: str) -> str:
        return _FORBIDDEN.sub("_", name)

    def log(self, rows: Rows) -> None:
        now = round(time.time() * 1000)
        metrics = [
            self._metric(name, value, now, step)
            for step, row in rows.items()
            for name, value in row.items()
        ]
        for at in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + _MOST_METRICS])

    def summarize(self, numbers: Mapping[str, object]) -> None:
        for name, value in numbers.items():
            self._client.set_tag(self._id, name, value)

    def finish(self, exit_code: int) -> None:
        status = {EXIT_DONE: "FINISHED", EXIT_RESUMABLE: "KILLED"}.get(exit_code, "FAILED")
        self._client.set_terminated(self._id, status)
