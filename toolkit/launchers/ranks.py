"""Ranks that are processes of this machine."""

import os
import select
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import TextIO

from toolkit.launchers.base import LaunchSpec
from toolkit.launchers.process import POLL_S, die_with_parent
from toolkit.run.directory import RunDirectory
from toolkit.text.redact import copy_to_log


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
            for rank in range(len(spec.rank_env)):
                self._processes.append(_start(spec, rank, on_terminal and rank == 0))
        except BaseException:
            self.close()
            raise
        self._descriptors = [os.pidfd_open(process.pid) for process in self._processes]
        # Threads start only now, after the last fork.
        for rank, process in enumerate(self._processes):
            if process.stdout is not None:
                copier = threading.Thread(
                    target=_copy, args=(process.stdout, run.rank_log(rank)), daemon=True
                )
                copier.start()
                self._copiers.append(copier)

    def codes(self) -> list[int | None]:
        """The exit code of each rank, None while it runs."""
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


def _copy(output: TextIO, log: Path) -> None:
    with output:
        copy_to_log(output, log)


def _start(spec: LaunchSpec, rank: int, on_terminal: bool) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        spec.argv,
        env=spec.process_env(rank),
        stdin=subprocess.DEVNULL,
        stdout=None if on_terminal else subprocess.PIPE,
        stderr=None if on_terminal else subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ctrl-C at the terminal is for the launcher, which passes it on once.
        start_new_session=True,
        preexec_fn=die_with_parent(SIGKILL),
    )
