"""Runs another tool's launcher, whose ranks are elsewhere."""

import math
import os
import signal
import subprocess
import time
from contextlib import suppress
from shutil import which

import psutil  # type: ignore[import-untyped]  # has no type hints of its own

from toolkit.errors import EXIT_DONE, EXIT_FAILED, BackendUnavailable
from toolkit.launchers.base import LaunchSpec, Outcome
from toolkit.launchers.outcome import has_failed, has_started, outcome_from_events
from toolkit.launchers.process import (
    FAILED_GRACE_S,
    ORPHAN_GRACE_S,
    POLL_S,
    STOPPING,
    Deadline,
    StopSignals,
    die_with_parent,
)
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset, grace_over
from toolkit.text.terminal import tell

_LOOK_S = 2.0
"""Interval of polling the events of a run whose ranks are elsewhere."""


def run_remote(spec: LaunchSpec, signals: StopSignals, restarts: bool = False) -> Outcome:
    """Run a launcher whose ranks are on other machines; see Starter.

    No signal reaches them: a stop is requested by a file in the run directory, which rank 0
    polls. After a rank reports a failure, the others have ORPHAN_GRACE_S, unless the launcher
    `restarts` them itself.
    """
    run, offset = RunDirectory(spec.run_dir), events_offset(spec.run_dir)
    run.stop.unlink(missing_ok=True)
    process = subprocess.Popen(
        spec.argv,
        env=spec.process_env(0),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGTERM),
    )
    asked, deadline, looked_at = False, Deadline(), time.monotonic()
    while process.poll() is None:
        if signals.stop_requested and not asked:
            asked = True
            tell(STOPPING)
            run.stop.touch()
            # Ranks that have not started do not poll it; they lose nothing.
            deadline.start(spec.grace_s if has_started(run.path, offset) else ORPHAN_GRACE_S)
        if not restarts and time.monotonic() - looked_at > _LOOK_S:
            looked_at = time.monotonic()
            if has_failed(spec.run_dir, offset):
                deadline.start(ORPHAN_GRACE_S)
        if signals.kill_requested or deadline.passed:
            if asked and not signals.kill_requested and spec.grace_s < math.inf:
                tell(f"error: {grace_over(spec.grace_s, run.path, offset)[0]}")
            _end(process)
        time.sleep(POLL_S)
    run.stop.unlink(missing_ok=True)
    return outcome_from_events(spec.run_dir, offset, process.returncode, asked)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Terminate the launcher, and kill what has not exited by then or is left behind."""
    below = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(FAILED_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    for one in below:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def require_program(launcher: str, spec: LaunchSpec, fix: str) -> None:
    """Raise BackendUnavailable if the launcher's program is not on this machine."""
    if which(spec.argv[0]) is None:
        raise BackendUnavailable(
            f"launch.launcher is {launcher}, but there is no `{spec.argv[0]}` here",
            fix=fix,
        )


def run_submission(spec: LaunchSpec) -> Outcome:
    """Submit a job to a scheduler; returns when it is accepted or refused."""
    done = subprocess.run(spec.argv, env=spec.process_env(0), check=False)
    if done.returncode:
        reason = f"{spec.argv[0]} ended with code {done.returncode}"
        tell(f"error: {reason}; its message is above")
        return Outcome(EXIT_FAILED, reason)
    return Outcome(EXIT_DONE)
