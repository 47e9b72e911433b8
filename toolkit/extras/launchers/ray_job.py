"""`ray`: tasks of Ray, one per machine, in which `dmt launch` runs.

Ray's driver (ray_driver.py) is a child in a session of its own: neither a terminal nor
`kill -PGID` reaches it and what it starts, only this launcher. The run directory is on a disk
that all machines share: there, a file asks the ranks to stop, and the agents leave their
output for the terminal.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, BackendUnavailable
from toolkit.extras.launchers.ray import INSTALL
from toolkit.launchers.base import DMT, Job, LaunchSpec, Outcome
from toolkit.launchers.outcome import USER_CODES
from toolkit.launchers.process import (
    FAILED_GRACE_S,
    ORPHAN_GRACE_S,
    STOPPING,
    Deadline,
    StopSignals,
    die_with_parent,
)
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset, grace_over, stopped_at
from toolkit.run.recorded import read_events
from toolkit.system.interpreter import python, safe_path
from toolkit.text.terminal import tell

_POLL_S = 1.0
_DRIVER = ("-u", "-m", "toolkit.extras.launchers.ray_driver")


class RayStarter:
    """A job of Ray, whose driver is a child of this process."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the command of each machine; see Starter."""
        if importlib.util.find_spec("ray") is None:
            raise BackendUnavailable(
                "launch.launcher is ray: Ray is not installed", fix=INSTALL
            )
        launch = (*DMT, "launch", str(job.recipe_file), "--run-dir", str(job.run_dir))
        return LaunchSpec(
            (*python(), "-u", *launch, "--launcher", "local"),
            job.run_dir,
            env={"PYTHONSAFEPATH": "1"} if safe_path() else {},
            grace_s=job.grace_s,
            files={job.recipe_file: job.recipe},
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start the job and wait; see Starter."""
        return _Watch(spec, signals).outcome()


class _Watch:
    """One job, from the start of its driver to the outcome."""

    def __init__(self, spec: LaunchSpec, signals: StopSignals) -> None:
        self._spec, self._signals = spec, signals
        self._run, self._offset = RunDirectory(spec.run_dir), events_offset(spec.run_dir)
        self._run.stop.unlink(missing_ok=True)
        self._shown = {log: log.stat().st_size for log in self._logs()}
        """Bytes of each log that were printed, or are of an earlier launch."""
        self._events: Sequence[Mapping[str, Any]] = ()
        """Of this launch, at the last look."""
        self._stopping = False
        self._saving, self._starting = Deadline(), Deadline()
        """When ranks that were asked to stop, and those that do not train, are killed."""

    def outcome(self) -> Outcome:
        """Start the driver, wait for its end or end it."""
        driver = _start(self._spec)
        over: Outcome | None = None
        try:
            while over is None:
                with suppress(subprocess.TimeoutExpired):
                    code = driver.wait(_POLL_S)
                    break
                self._show()
                over = self._pass_on()
        finally:
            _end(driver, 0 if self._signals.kill_requested else FAILED_GRACE_S)
            with suppress(OSError):
                self._run.stop.unlink(missing_ok=True)
        self._show()
        return over or _ended(code)

    def _show(self) -> None:
        """Print what the agents have printed."""
        for log in self._logs():
            with suppress(OSError), log.open("rb") as file:
                file.seek(self._shown.get(log, 0))
                new = file.read()
                self._shown[log] = file.tell()
                print(new.decode(errors="replace"), end="", file=sys.stderr, flush=True)

    def _logs(self) -> list[Path]:
        return sorted(self._run.logs.glob(agent_log(self._run, "*").name))

    def _pass_on(self) -> Outcome | None:
        """Ask the ranks to stop if that is requested; how the run ends without them."""
        if not self._signals.stop_requested:
            return None
        if not self._stopping:
            self._stopping = True
            tell(STOPPING)
            self._saving.start(self._spec.grace_s)
        with suppress(OSError):  # rank 0 removes it, and may be started again after that
            self._run.stop.touch()
        with suppress(OSError):  # of a shared disk; the next look may do better
            self._events = read_events(self._run.events, self._offset)
        if self._signals.kill_requested:
            tell("error: the ranks were killed, as requested")
            return Outcome(EXIT_FAILED if stopped_at(self._events) is None else EXIT_RESUMABLE)
        if self._saving.passed:
            message, code = grace_over(self._spec.grace_s, self._run.path, self._offset)
            tell(f"error: {message}")
            return Outcome(code)
        lives = [e["kind"] for e in self._events if e["kind"] in ("start", "end", "failure")]
        if lives[-1:] != ["start"]:  # otherwise they may save as long as they need
            self._starting.start(ORPHAN_GRACE_S)
            if self._starting.passed:
                tell("dmt: stopped by a signal while no rank trained")
                return Outcome(EXIT_RESUMABLE)
        return None


def _ended(code: int) -> Outcome:
    """How a run ended whose driver ended with this code, that of the first agent or its own."""
    if how := untold_end(code):
        tell(f"error: Ray's driver ended: {how}")
        return Outcome(EXIT_FAILED)
    return Outcome(code)


def untold_end(code: int) -> str:
    """How a process ended that has not told it; empty if the code is one of errors.py."""
    if code in (EXIT_DONE, EXIT_RESUMABLE, EXIT_FAILED, *USER_CODES):
        return ""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _start(spec: LaunchSpec) -> "subprocess.Popen[bytes]":
    given = {"argv": spec.argv, "env": dict(spec.env), "run_dir": str(spec.run_dir)}
    return subprocess.Popen(
        (*python(), *_DRIVER, json.dumps(given)),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )


def _end(driver: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Leave nothing of the driver's session: it may leave Ray first."""
    if driver.poll() is None and grace_s:
        driver.terminate()
        with suppress(subprocess.TimeoutExpired):
            driver.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def agent_log(run: RunDirectory, machine: int | str) -> Path:
    """The file with what one machine's agent prints, rank 0 included."""
    return run.logs / f"ray-{machine}.log"
