"""Runs another launcher without orphans.

The command: `python -m toolkit.launchers.guard GRACE_S RUN_DIR COMMAND…`.

torchrun and deepspeed differ in their handling of signals: deepspeed's runner exits on SIGTERM
without its workers, both kill workers that take longer than 30 s to save, and nothing stops the
workers if the launcher is killed. So this process signals the workers itself, once each, and
leaves no descendant at the end. Its standard input is a pipe from DMT's launcher; when that is
killed, the pipe closes. SIGTERM requests a graceful stop of the workers, SIGUSR2 kills them.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no type hints of its own

from toolkit.launchers.process import (
    FAILED_GRACE_S,
    ORPHAN_GRACE_S,
    POLL_S,
    Deadline,
    StopSignals,
    adopt_orphans,
    die_with_parent,
    show_stacks,
    wake_if_stopped,
)
from toolkit.run.ending import events_offset, grace_over
from toolkit.text.terminal import survive_lost_output, tell

_LOOK_S = 1.0
"""Interval of checking for stopped ranks."""


class Guard:
    """Another tool's launcher and all its descendants."""

    def __init__(self, command: Sequence[str], grace_s: float, run_dir: Path) -> None:
        self._grace_s = grace_s
        self._run_dir = run_dir
        self._offset = events_offset(run_dir)
        self._looked_at = 0.0
        self._woken = Deadline()
        self._signalled: set[int] = set()
        self._waits = Deadline()
        self._deadline = Deadline()
        self._parent_gone = threading.Event()
        self._kill_requested = False  # no lock, which a second signal would wait for
        signal.signal(signal.SIGUSR2, self._request_kill)
        adopt_orphans()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent(signal.SIGTERM)
        )
        threading.Thread(target=self._watch_parent, daemon=True).start()

    def _request_kill(self, *_: object) -> None:
        self._kill_requested = True

    def _watch_parent(self) -> None:
        # Not through sys.stdin, whose lock this thread would hold at the interpreter's end.
        os.read(0, 1)
        self._parent_gone.set()

    def wait(self, signals: StopSignals) -> int:
        """Return the launcher's exit code after it and all its workers have exited."""
        while self._process.poll() is None:
            if signals.stop_requested or self._parent_gone.is_set():
                orphaned = self._parent_gone.is_set() and math.isinf(self._grace_s)
                self._deadline.start(ORPHAN_GRACE_S if orphaned else self._grace_s)
                self._stop_workers()
                self._waits.start(FAILED_GRACE_S)
                if self._waits.passed and not self._signalled:
                    self._process.terminate()  # It waits for other machines.
            if self._deadline.passed:
                tell(f"error: {grace_over(self._grace_s, self._run_dir, self._offset)[0]}")
                show_stacks([worker.pid for worker in workers()])
            if self._kill_requested or self._deadline.passed:
                _kill(psutil.Process().children(recursive=True))
            self._wake_stopped()
            time.sleep(POLL_S)
        # Workers that the launcher left behind.
        self._deadline.start(ORPHAN_GRACE_S)
        while list(workers()) and not self._deadline.passed:
            self._stop_workers()
            self._wake_stopped()
            time.sleep(POLL_S)
        _kill(workers())
        return self._process.returncode

    def _wake_stopped(self) -> None:
        """Wake stopped ranks that were asked to end; kill them after a while.

        Those that this process asked get the grace period to save.
        """
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        woken = [worker for worker in workers() if wake_if_stopped(worker.pid)]
        if woken and not self._signalled:
            self._woken.start(FAILED_GRACE_S)
        if self._woken.passed:
            _kill(workers())
            self._woken = Deadline()  # An agent may start others.

    def _stop_workers(self) -> None:
        """Signal every worker once; those that are not started yet, when they appear."""
        for worker in workers():
            if worker.pid not in self._signalled:
                self._signalled.add(worker.pid)
                with suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGTERM)


def workers() -> Iterator[psutil.Process]:
    """Yield the rank processes, without their children."""
    below = [*psutil.Process().children()]
    while below:
        process = below.pop()
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if "RANK" in process.environ():
                yield process
            else:
                below.extend(process.children())
        except psutil.NoSuchProcess:
            continue


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def main(grace_s: float, run_dir: Path, command: Sequence[str]) -> int:
    """Run `command`; return its exit code (128 + n when signal n killed it)."""
    survive_lost_output()
    with StopSignals() as signals:
        code = Guard(command, grace_s, run_dir).wait(signals)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
