"""The trainer's side of a tracker: starts, monitors and finishes its follower process."""

import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.system.interpreter import python
from toolkit.text.redact import redact
from toolkit.track.follower import FollowerSettings, PostedState
from toolkit.track.trackers import TRACKERS
from toolkit.track.trackers.base import Settings, Tracker


class TrackerFollower:
    """A running follower. No method waits for the tracker, except `finish` up to its limit.

    The user is informed once when it fails: `problem` or `finish` returns the line to show,
    and a `warning` event is written. Training continues either way.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        name: str,
        settings: Settings,
        run_name: str,
        events: EventLog,
    ) -> None:
        """Start it on rank 0, behind MetricsLog.resume; `name` is one of TRACKERS."""
        self._run_dir, self._name, self._settings = run_dir, name, settings
        self._tracker = TRACKERS[name]
        self._events = events
        self._told = self._asked = False
        # Written here so that the first checkpoint knows the run's id.
        state = run_dir.tracker_state(name)
        PostedState.load(state).save(state)
        self._process = subprocess.Popen(
            [*python(), "-m", "toolkit.track.follower", str(run_dir.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=_environment(os.environ, self._tracker),
            # Its own session: a Ctrl-C at the terminal is for the trainer.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        asked = FollowerSettings(name, settings, run_name, os.getpid())
        self._say(json.dumps(jsonl.plain(asdict(asked))))

    def problem(self) -> str | None:
        """Return, once, why the tracker does not work; cheap enough for every logged step."""
        if self._told or self._process.poll() in (None, 0):
            return None
        assert self._process.stdout is not None
        reason = self._process.stdout.read().decode().strip()
        return self._tell(reason or "its process ended unexpectedly")

    def end(self) -> None:
        """Ask it to post the rest and end; call this behind the `end` event."""
        self._asked = True
        self._say("end")

    def finish(self, timeout_s: float) -> str | None:
        """Wait for its end; return the line for the user when that did not work.

        It is killed after `timeout_s`; call this once.
        """
        if not self._asked:
            self.end()
        with self._process as process:  # Closes the pipes.
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return self._tell(f"it did not finish within {timeout_s:g} s")
            return self.problem()

    def afterwards(self) -> str | None:
        """What the user may do with the run now."""
        return self._tracker.afterwards(self._run_dir, self._settings)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        # The follower has already exited: `problem` has the reason.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")

    def _tell(self, reason: str) -> str:
        self._told = True
        self._events.write("warning", source=self._name, message=reason)
        return redact(
            f"{self._tracker.title} is off: {reason}. Training is not affected; metrics.jsonl "
            f"has everything, details are in logs/{self._name}.log"
        )


def _environment(environment: Mapping[str, str], tracker: type[Tracker]) -> dict[str, str]:
    # A process with a rank is a worker, and launchers terminate workers.
    not_inherited = ("RANK", *tracker.not_inherited)
    kept = {name: text for name, text in environment.items() if name not in not_inherited}
    return kept | dict(tracker.environment)
