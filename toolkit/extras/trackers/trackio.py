"""trackio: its database on this machine, in its own folder or that of TRACKIO_DIR."""

from collections.abc import Mapping
from typing import ClassVar

from toolkit.track.trackers.base import Rows, TrackedRun, Tracker


class TrackioTracker(Tracker):
    """A run of trackio, through its storage: its `Run` reports a failure nowhere."""

    title = "trackio"
    extra = "trackio"
    packages: ClassVar[Mapping[str, tuple[str, str]]] = {"trackio": ("trackio", "")}
    environment: ClassVar[Mapping[str, str]] = {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def start(self, run: TrackedRun) -> Mapping[str, int]:
        from trackio.sqlite_storage import SQLiteStorage

        self._run, self._storage = run, SQLiteStorage
        self._project = run.settings["project"]
        newest: dict[str, int] = {}
        if SQLiteStorage.get_project_db_path(self._project).exists():
            for line in SQLiteStorage.get_logs(self._project, run.name, run_id=run.run_id):
                newest |= {name: max(line["step"], newest.get(name, 0)) for name in line}
        return newest

    def log(self, rows: Rows) -> None:
        self._storage.bulk_log(
            self._project,
            self._run.name,
            metrics_list=[dict(row) for row in rows.values()],
            steps=[*rows],
            config=dict(self._run.config),
            run_id=self._run.run_id,
        )

    def finish(self, exit_code: int) -> None:
        """Everything is stored already."""
