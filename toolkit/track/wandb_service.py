"""The trainer's side of W&B: start the follower process, hear from it, let it finish."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from toolkit.recipe.schema import WandbSection
from toolkit.redact import redact
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.track.wandb_follower import FollowerSettings, PostedState

_NOT_INHERITED = (
    # Of another W&B run around this one; the recipe decides these.
    *("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR", "WANDB_MODE"),
    # What has a rank is a worker, and launchers end workers.
    "RANK",
)


class WandbFollower:
    """A running follower. No method waits for W&B, except `finish` up to its limit.

    The user is informed once when W&B fails: `problem` or `finish` returns the line to show,
    and a `warning` event is written. Training continues either way.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes] | None",
        events: EventLog,
        offline: Path | None = None,
    ) -> None:
        self._process = process
        self._events = events
        self._offline = offline
        self._told = False

    @classmethod
    def start(
        cls, run_dir: RunDirectory, section: WandbSection, run_name: str, events: EventLog
    ) -> "WandbFollower":
        """Start it on rank 0, behind MetricsLog.resume; `mode: disabled` starts nothing."""
        if section.mode == "disabled":
            return cls(None, events)
        settings = FollowerSettings(
            **section.model_dump(), run_name=run_name, trainer_pid=os.getpid()
        )
        # Written here so that the first checkpoint knows the run's id.
        PostedState.load(run_dir.wandb_state).save(run_dir.wandb_state)
        process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.track.wandb_follower", str(run_dir.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=_environment(os.environ),
            # Its own session: a Ctrl-C at the terminal is for the trainer.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        offline = run_dir.wandb if section.mode == "offline" else None
        follower = cls(process, events, offline)
        follower._say(json.dumps(jsonl.plain(asdict(settings))))
        return follower

    def problem(self) -> str | None:
        """Return, once, why W&B does not work; cheap enough for every logged step."""
        if self._process is None or self._told or self._process.poll() in (None, 0):
            return None
        assert self._process.stdout is not None
        reason = self._process.stdout.read().decode().strip()
        return self._tell(reason or "its process ended unexpectedly")

    def finish(self, timeout_s: float) -> str | None:
        """Let it post the rest; return the line for the user when that did not work.

        It is killed after `timeout_s`; call this once, behind the `end` event.
        """
        if self._process is None:
            return None
        self._say("end")
        with self._process as process:  # Closes the pipes.
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return self._tell(f"it did not finish within {timeout_s:g} s")
            return self.problem()

    def to_sync(self) -> str | None:
        """How to upload what was written offline: each start of a run has its own folder."""
        if self._offline is None or not (parts := list(self._offline.glob("offline-run-*"))):
            return None
        what = "the run" if len(parts) == 1 else f"all {len(parts)} starts of the run"
        folder = quote(str(self._offline))
        return f"to upload {what} to W&B: wandb sync {folder}"

    def _say(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # A follower that has ended already: `problem` says why.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")

    def _tell(self, reason: str) -> str:
        self._told = True
        self._events.write("warning", source="wandb", message=reason)
        return redact(
            f"W&B is off: {reason}. Training is not affected; metrics.jsonl has everything, "
            "details are in logs/wandb.log"
        )


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: text for name, text in environment.items() if name not in _NOT_INHERITED}
    # W&B would report its own crashes to its maker, also in offline mode.
    return kept | {"WANDB_ERROR_REPORTING": "false"}
