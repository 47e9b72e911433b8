"""Ranks that are processes of this machine."""

import os
import select
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import TextIO

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE
from toolkit.launchers.base import LaunchSpec
from toolkit.launchers.outcome import USER_CODES, RankExit, report_failure
from toolkit.launchers.process import (
    FAILED_GRACE_S,
    POLL_S,
    STOPPING,
    Deadline,
    StopSignals,
    die_with_parent,
    show_stacks,
)
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.text.redact import copy_to_log
from toolkit.text.terminal import tell


class RankProcesses:
    """One process per rank, until `close`.

    Start them in the main thread: when that thread ends, the kernel kills the processes.
    """

    def __init__(self, spec: LaunchSpec, *, on_terminal: bool) -> None:
        """`on_terminal`: rank 0 has the terminal. The output of others goes to their logs."""
        run = RunDirectory(spec.run_dir)
        run.logs.mkdir(parents=True, exist_ok=True)
        self._processes: list[subprocess.Popen[str]] = []
        self._descriptors: list[int] = []
        self._copiers: list[threading.Thread] = []
        self.killed = False
        try:
            for index, rank in enumerate(spec.ranks):
                self._processes.append(_start(spec, index, on_terminal and rank == 0))
        except BaseException:
            self.close()
            raise
        self._descriptors = [os.pidfd_open(process.pid) for process in self._processes]
        # Threads start only now, after the last fork.
        for rank, process in zip(spec.ranks, self._processes, strict=True):
            if process.stdout is not None:
                copier = threading.Thread(
                    target=_copy, args=(process.stdout, run.rank_log(rank)), daemon=True
                )
                copier.start()
                self._copiers.append(copier)

    def codes(self) -> list[int | None]:
        """The exit code of each process, None while it runs."""
        return [process.poll() for process in self._processes]

    def running(self) -> list[int]:
        """Process ids of the ranks that have not ended."""
        return [process.pid for process in self._processes if process.poll() is None]

    def sleep_until_exit(self) -> None:
        """Wait for POLL_S, or until a rank ends."""
        # Wakes immediately: the rank that failed first must be seen before those that fail
        # milliseconds later because they lost it.
        poll = select.poll()
        for process, descriptor in zip(self._processes, self._descriptors, strict=True):
            if process.returncode is None:
                poll.register(descriptor, select.POLLIN)
        poll.poll(POLL_S * 1000)

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that have not ended."""
        for process in self._processes:
            process.send_signal(number)

    def finish_logs(self) -> None:
        """Wait until the output of ranks that have ended is in their logs."""
        for copier in self._copiers:
            copier.join(timeout=1.0)

    def kill(self) -> None:
        """Kill the remaining ranks, and the children of all ranks in the process group."""
        self.killed = True
        for process in self._processes:
            with suppress(ProcessLookupError):  # No process of that group is left.
                os.killpg(process.pid, SIGKILL)
            process.wait()

    def close(self) -> None:
        """Leave no process and no descriptor behind."""
        self.kill()
        self.finish_logs()
        for descriptor in self._descriptors:
            os.close(descriptor)


class RankWatch(RankProcesses):
    """Ranks from their start to the outcome, with the requests to stop them.

    A rank that fails ends the others, which have FAILED_GRACE_S then.
    """

    def __init__(self, spec: LaunchSpec, signals: StopSignals) -> None:
        self._spec, self._signals = spec, signals
        self._run = RunDirectory(spec.run_dir)
        self.events = EventLog(self._run.events)
        self._stopping = False
        self._failed: list[RankExit] = []
        self._deadline = Deadline()
        super().__init__(spec, on_terminal=True)

    def watch(self) -> bool:
        """Pass on stop requests, and wait for a moment. Returns False when no rank runs."""
        if not self.running():
            return False
        if self._signals.kill_requested:
            self.kill()
        if self._deadline.passed:
            show_stacks(self.running())
            self.kill()
        if self._signals.stop_requested and not self._stopping:
            tell(STOPPING)
            self.stop()
        self._note_failure()
        self.sleep_until_exit()
        return True

    def stop(self) -> None:
        """Let the ranks save and leave."""
        self._stopping = True
        self.signal(SIGTERM)

    def outcome(self) -> tuple[int, str]:
        """Exit code of the ranks, which have all ended, and the reason of a failure, which is
        printed."""
        self._note_failure()
        self.finish_logs()
        codes = self.codes()
        if not self._failed:
            return (EXIT_DONE if set(codes) == {EXIT_DONE} else EXIT_RESUMABLE), ""
        seen, ranks = self._failed, self._spec.ranks
        if not self.killed:  # a large rank may be reaped after those that lost it
            killed = [r for r, code in zip(ranks, codes, strict=True) if code == -SIGKILL]
            seen = [*seen, *(RankExit(rank, -SIGKILL) for rank in killed)]
        if ranks[0] == 0 and codes[0] in USER_CODES and codes[0] == seen[0].code:
            seen = [RankExit(0, codes[0])]  # found by all ranks, reported by this one
        return report_failure(self._run, self.events.new(), seen)

    def _note_failure(self) -> None:
        """Record the ranks that failed first, and terminate the others."""
        if self._failed:
            return
        harmless = {None, EXIT_DONE, EXIT_RESUMABLE}
        if self._stopping:
            # Stopped before its handler was set: there was nothing to save yet.
            harmless.add(-SIGTERM)
        if any(code not in harmless for code in self.codes()):
            # Checked again: a rank that exits because it lost another is seen after that one.
            self._failed = [
                RankExit(rank, code)
                for rank, code in zip(self._spec.ranks, self.codes(), strict=True)
                if code and code not in harmless
            ]
            self._end_others()
        elif -SIGTERM in self.codes():
            self._end_others()

    def _end_others(self) -> None:
        if not self._stopping:
            self.stop()
        self._deadline.start(FAILED_GRACE_S)


def _copy(output: TextIO, log: Path) -> None:
    with output:
        copy_to_log(output, log)


def _start(spec: LaunchSpec, index: int, on_terminal: bool) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        spec.argv,
        env=spec.process_env(index),
        stdin=subprocess.DEVNULL,
        stdout=None if on_terminal else subprocess.PIPE,
        stderr=None if on_terminal else subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ctrl-C at the terminal is for the launcher, which passes it on once.
        start_new_session=True,
        preexec_fn=die_with_parent(SIGKILL),
    )
