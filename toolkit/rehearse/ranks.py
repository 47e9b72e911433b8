"""The processes of one rehearsed layout: started, watched, and ended."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from toolkit.launchers.base import Job, LaunchSpec
from toolkit.launchers.local import LocalStarter
from toolkit.launchers.outcome import RankExit
from toolkit.launchers.process import POLL_S, StopSignals, die_with_parent
from toolkit.recipe.schema import ClusterSection
from toolkit.run.directory import RunDirectory
from toolkit.text.redact import redact

_TAIL_LINES = 20


@dataclass(frozen=True)
class Failure:
    """Why a layout did not finish."""

    why: str
    """One line."""
    log: str
    """The end of the failed rank's output."""


def launch_spec(
    run_dir: Path, processes: int, worker: Sequence[str], gpu: str = "cpu"
) -> LaunchSpec:
    """One process per rank on this machine: on its `gpu`s (name of the hardware catalogue), or
    on its CPU even if it has GPUs.

    `worker` is what Python runs: `-m`, a module and its arguments.
    """
    cluster = ClusterSection(gpus_per_node=processes, gpu=gpu)
    return LocalStarter().spec(Job(run_dir, cluster, worker=tuple(worker)))


class RankProcesses:
    """Running processes; a context manager that leaves none behind.

    Enter it in the main thread: when that thread ends, the kernel kills the processes. A stop
    signal also ends them and then raises KeyboardInterrupt.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._run = RunDirectory(spec.run_dir)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._at_exit = ExitStack()
        self._signals = StopSignals()

    def __enter__(self) -> "RankProcesses":
        self._run.logs.mkdir(parents=True, exist_ok=True)
        # Flags, because an exception would be lost where a process forks: Python prints what
        # is raised in hooks such as logging's, and continues.
        self._at_exit.enter_context(self._signals)
        self._at_exit.callback(self._kill)
        try:
            for rank in range(len(self._spec.rank_env)):
                self._processes.append(self._start(rank))
        except BaseException:
            self._at_exit.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._at_exit.close()
        if error[0] is None:
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._signals.stop_requested:
            raise KeyboardInterrupt

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        with self._run.rank_log(rank).open("wb") as log:
            return subprocess.Popen(
                self._spec.argv,
                env=self._spec.process_env(rank),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal is for the command, which ends the ranks itself.
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    def wait(self, limit_s: float) -> Failure | None:
        """Wait until all ranks have exited; None if all succeeded.

        The first failure ends the others, and so does the time limit, counted from now.
        """
        deadline = time.monotonic() + limit_s
        poll, ranks = select.poll(), {}
        for rank, process in enumerate(self._processes):
            descriptor = os.pidfd_open(process.pid)
            self._at_exit.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
            ranks[descriptor] = rank
        while ranks:
            # Wakes at once: the rank that failed first must be seen before those that
            # fail milliseconds later because it is gone.
            for descriptor, _ in poll.poll(POLL_S * 1000):
                poll.unregister(descriptor)
                rank = ranks.pop(descriptor)
                if code := self._processes[rank].wait():
                    self._kill()
                    return self._failure(RankExit(rank, code))
            self._stop_if_asked()
            if ranks and time.monotonic() >= deadline:
                self._kill()
                return Failure(f"no end after {limit_s:g} s", self._log(min(ranks.values())))
        return None

    def _failure(self, failed: RankExit) -> Failure:
        log = self._log(failed.rank)
        # A worker's last line is its error; a killed one has none.
        said = log.rpartition("\n")[2] if failed.code > 0 else ""
        return Failure(said or failed.describe(), log)

    def _log(self, rank: int) -> str:
        """The last lines that a rank printed, secrets masked."""
        text = redact(self._run.rank_log(rank).read_text("utf-8", errors="replace"))
        return "\n".join([line for line in text.splitlines() if line.strip()][-_TAIL_LINES:])

    def _kill(self) -> None:
        """Kill the remaining processes, each with the children in its process group."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
