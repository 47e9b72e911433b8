"""`ray`: Ray Train's `TorchTrainer` around `toolkit.train`; Ray restarts what failed.

Ray's driver (ray_driver.py) is a child in a session of its own: neither a terminal nor
`kill -PGID` reaches it and what it starts, only this launcher. The run directory is on a disk
that all machines share: there, a file asks the ranks to stop, rank 0 leaves its output for the
terminal, and each rank how it ended.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, BackendUnavailable
from toolkit.extras.launchers.ray import INSTALL
from toolkit.extras.launchers.ray_record import RayRecord
from toolkit.launchers.base import DMT, Job, LaunchSpec, Outcome, spec_of
from toolkit.launchers.outcome import USER_CODES, RankExit, failure_code, report_failure
from toolkit.launchers.process import (
    FAILED_GRACE_S,
    ORPHAN_GRACE_S,
    STOPPING,
    Deadline,
    StopSignals,
    die_with_parent,
)
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset, grace_over
from toolkit.system.interpreter import python
from toolkit.text.terminal import tell

_POLL_S = 1.0
_DRIVER = ("-u", "-m", "toolkit.extras.launchers.ray_driver")


class RayStarter:
    """A Ray Train job, whose driver is a child of this process."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the command of each rank; see Starter."""
        if importlib.util.find_spec("ray") is None:
            raise BackendUnavailable(
                "launch.launcher is ray: Ray is not installed", fix=INSTALL
            )
        rank = ("-u", *DMT, "train", str(job.recipe_file), "--run-dir", str(job.run_dir))
        return spec_of(job, (*python(), *rank), files={job.recipe_file: job.recipe})

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start the job and wait; see Starter."""
        return _Watch(spec, signals).outcome()


class _Watch:
    """One job, from the start of its driver to the outcome."""

    def __init__(self, spec: LaunchSpec, signals: StopSignals) -> None:
        self._spec, self._signals = spec, signals
        self._run, self._offset = RunDirectory(spec.run_dir), events_offset(spec.run_dir)
        self._run.logs.mkdir(parents=True, exist_ok=True)
        self._run.stop.unlink(missing_ok=True)
        self._record = RayRecord(self._run)
        self._record.clear()
        self._output = _Output(rank_0(self._run))
        self._stopping = False
        self._saving, self._starting = Deadline(), Deadline()
        """When ranks that were asked to stop, and those that do not train yet, are killed."""

    def outcome(self) -> Outcome:
        """Start the driver, wait for its end or end it."""
        driver = _start(self._spec)
        over: Outcome | None = None
        try:
            while over is None:
                with suppress(subprocess.TimeoutExpired):
                    code = driver.wait(_POLL_S)
                    break
                self._output.show()
                over = self._pass_on()
        finally:
            _end(driver, 0 if self._signals.kill_requested else FAILED_GRACE_S)
            with suppress(OSError):
                self._run.stop.unlink(missing_ok=True)
        self._output.show()
        return over or self._ended(code)

    def _pass_on(self) -> Outcome | None:
        """Ask the ranks to stop if that is requested; how the run ends if they do not."""
        if not self._signals.stop_requested:
            return None
        if not self._stopping:
            self._stopping = True
            tell(STOPPING)
            self._saving.start(self._spec.grace_s)
        with suppress(OSError):  # rank 0 removes it, and may be started again after that
            self._run.stop.touch()
        at_work = self._record.at_work()
        if not at_work:
            self._starting.start(ORPHAN_GRACE_S)
        if not (self._saving.passed or self._signals.kill_requested):
            if at_work or not self._starting.passed:
                return None
            tell("dmt: stopped by a signal while no rank trained")
            return Outcome(EXIT_RESUMABLE)
        message, code = grace_over(self._spec.grace_s, self._run.path, self._offset)
        if not self._saving.passed:
            message = "the ranks were killed, as requested"
        tell(f"error: {message}")
        return Outcome(code, message)

    def _ended(self, code: int) -> Outcome:
        """How the ranks ended whose driver ended with this code, that of rank 0 or its own."""
        last = self._record.attempts()[-1:]
        if last and last[0].failed:
            failed = last[0].failed
            by_all = RankExit(0, failed[0].code)
            if by_all in failed and by_all.code in USER_CODES:
                failed = [by_all]  # found by all ranks, reported by this one
            return report_failure(self._run.path, last[0].offset, failed)
        if code in (EXIT_DONE, EXIT_RESUMABLE):
            return Outcome(code)
        if code not in (EXIT_FAILED, *USER_CODES):  # which it has told
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            tell(f"error: Ray's driver ended: {how}")
        return Outcome(failure_code(code))


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


class _Output:
    """What rank 0 printed since the start, from its file to this terminal."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._shown = file.stat().st_size if file.exists() else 0

    def show(self) -> None:
        with (
            suppress(OSError),
            self._file.open("rb") as file,
        ):  # not there yet, say
            file.seek(self._shown)
            new = file.read()
            self._shown += len(new)
            print(new.decode(errors="replace"), end="", file=sys.stderr, flush=True)


def rank_0(run: RunDirectory) -> Path:
    """The file with what rank 0 prints."""
    return run.logs / "ray-rank-0.log"
