"""Weights & Biases: offline into RUN/wandb, or to its server."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar

from toolkit.errors import EXIT_RESUMABLE
from toolkit.run.directory import RunDirectory
from toolkit.track.trackers.base import GaveUp, Rows, Settings, TrackedRun, Tracker


class WandbTracker(Tracker):
    """A run of W&B."""

    title = "W&B"
    not_inherited = ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR", "WANDB_MODE")
    # W&B would report its own crashes to its maker, also in offline mode.
    environment: ClassVar[Mapping[str, str]] = {"WANDB_ERROR_REPORTING": "false"}

    def start(self, run: TrackedRun) -> None:
        import wandb

        _check_writable(run.directory.wandb)
        self._wandb = wandb
        self._run = wandb.init(
            **run.settings,
            name=run.name,
            id=run.run_id,
            resume="allow" if run.settings["mode"] == "online" else None,
            dir=run.directory.path,
            config=dict(run.config),
            settings=_private_settings(wandb),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._files = Path(self._run.dir)

    def log(self, rows: Rows) -> None:
        if not self._files.exists():
            raise GaveUp(f"its folder {self._files.parent} was removed")
        for step, row in rows.items():
            self._run.log({**row, "step": step}, step=step)

    def summarize(self, numbers: Mapping[str, object]) -> None:
        self._run.summary.update(numbers)

    def finish(self, exit_code: int) -> None:
        if exit_code == EXIT_RESUMABLE:
            self._run.mark_preempting()
        self._run.finish(exit_code=exit_code)
        # wandb-core would notice by itself, but only later, that its user is gone.
        self._wandb.teardown(exit_code=exit_code)

    @staticmethod
    def afterwards(run: RunDirectory, settings: Settings) -> str | None:
        """How to upload what was written offline: each start of a run has its own folder."""
        parts = list(run.wandb.glob("offline-run-*"))
        if settings["mode"] != "offline" or not parts:
            return None
        what = "the run" if len(parts) == 1 else f"all {len(parts)} starts of the run"
        return f"to upload {what} to W&B: wandb sync {quote(str(run.wandb))}"


def _private_settings(wandb: Any) -> Any:
    """Return settings that keep command line, host, paths and console away from W&B."""
    return wandb.Settings(
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
        x_save_requirements=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        console="off",
        host="",
        program="dmt",
    )


def _check_writable(folder: Path) -> None:
    # W&B would fall back to the machine's temporary folder silently.
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise GaveUp(f"{folder} cannot be written ({error.strerror})") from error
