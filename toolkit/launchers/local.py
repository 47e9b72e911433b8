"""`local`: DMT itself starts one process per rank on this machine."""

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from signal import SIGKILL

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE
from toolkit.launchers.base import (
    LOOPBACK,
    Job,
    LaunchSpec,
    Outcome,
    check_loopback,
    free_port,
    on_several_machines,
    one_machine,
    spec_of,
)
from toolkit.launchers.outcome import USER_CODES, RankExit, report_failure
from toolkit.launchers.process import (
    FAILED_GRACE_S,
    POLL_S,
    STOPPING,
    Deadline,
    StopSignals,
    die_with_parent,
    show_stacks,
    wake_if_stopped,
)
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset, grace_over
from toolkit.text.redact import copy_to_log
from toolkit.text.terminal import tell


class LocalStarter:
    """One process per rank, each with its rank in the environment.

    Rank 0 has the terminal; the output of other ranks goes to logs/rank-N.log. If one rank
    fails, the others are terminated, and killed after FAILED_GRACE_S. If the launcher is
    killed, the kernel kills the ranks.
    """

    def spec(self, job: Job) -> LaunchSpec:
        """Return one process per rank; raises PlanError for more than one machine."""
        one_machine(job, "local", on_several_machines())
        world = job.cluster.gpus_per_node
        rendezvous = {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        return spec_of(
            job,
            (sys.executable, "-u", *job.train),
            env=rendezvous,
            rank_env=tuple({"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world)),
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start all ranks and wait for them; see Starter. Raises as `check_loopback` does."""
        check_loopback()
        ranks = _Ranks(spec)
        try:
            return ranks.wait(signals, spec.grace_s)
        finally:
            ranks.close()


class _Ranks:
    """The running processes of one launch."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._run_dir = spec.run_dir
        self._offset = events_offset(spec.run_dir)
        run = RunDirectory(spec.run_dir)
        run.logs.mkdir(parents=True, exist_ok=True)
        self._processes: list[subprocess.Popen[str]] = []
        self._copiers: list[threading.Thread] = []
        self._stopping = False
        self._killed = False
        self._failed: list[RankExit] = []
        self._deadline = Deadline()
        try:
            for rank in range(len(spec.rank_env)):
                self._processes.append(_start(spec, rank))
        except BaseException:
            self.kill()
            raise
        self._descriptors = [os.pidfd_open(process.pid) for process in self._processes]
        # Threads start only now, after the last fork.
        for rank, process in enumerate(self._processes):
            if process.stdout is not None:
                copier = threading.Thread(
                    target=copy_to_log, args=(process.stdout, run.rank_log(rank)), daemon=True
                )
                copier.start()
                self._copiers.append(copier)

    def wait(self, signals: StopSignals, grace_s: float) -> Outcome:
        """Return when all ranks have ended."""
        while any(process.poll() is None for process in self._processes):
            if signals.kill_requested:
                self.kill()
            if self._deadline.passed:
                message, code = grace_over(grace_s, self._run_dir, self._offset)
                if not self._failed:
                    tell(f"error: {message}")
                show_stacks(self._running())
                self.kill()
                if not self._failed and code == EXIT_RESUMABLE:
                    return Outcome(EXIT_RESUMABLE)
            if signals.stop_requested and not self._stopping:
                self._stopping = True
                tell(STOPPING)
                self._terminate()
                self._deadline.start(grace_s)
            self._note_failure()
            self._sleep_until_exit()
        self._note_failure()
        for copier in self._copiers:
            copier.join(timeout=1.0)
        codes = [process.returncode for process in self._processes]
        if self._failed:
            seen = self._failed
            if not self._killed:  # a large rank may be reaped after those that lost it
                seen = [*seen, *(RankExit(r, c) for r, c in enumerate(codes) if c == -SIGKILL)]
            if codes[0] in USER_CODES and codes[0] == seen[0].code:
                seen = [RankExit(0, codes[0])]  # found by all ranks, reported by this one
            return report_failure(self._run_dir, self._offset, seen)
        return Outcome(EXIT_DONE if set(codes) == {EXIT_DONE} else EXIT_RESUMABLE)

    def _sleep_until_exit(self) -> None:
        # Wakes immediately: the rank that failed first must be seen before those that fail
        # milliseconds later because they lost it.
        poll = select.poll()
        for process, descriptor in zip(self._processes, self._descriptors, strict=True):
            if process.returncode is None:
                poll.register(descriptor, select.POLLIN)
        poll.poll(POLL_S * 1000)

    def _note_failure(self) -> None:
        """Record the ranks that failed first, and terminate the others."""
        if self._failed:
            return
        harmless = {None, EXIT_DONE, EXIT_RESUMABLE}
        if self._stopping:
            # Stopped before its handler was set: there was nothing to save yet.
            harmless.add(-signal.SIGTERM)
        if any(process.poll() not in harmless for process in self._processes):
            # Checked again: a rank that exits because it lost another is seen after that one.
            codes = [process.poll() for process in self._processes]
            self._failed = [
                RankExit(r, c) for r, c in enumerate(codes) if c and c not in harmless
            ]
            self._end_others()
        elif any(process.poll() == -signal.SIGTERM for process in self._processes):
            self._end_others()

    def _end_others(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._terminate()
        for pid in self._running():
            wake_if_stopped(pid)
        self._deadline.start(FAILED_GRACE_S)

    def _running(self) -> list[int]:
        return [process.pid for process in self._processes if process.poll() is None]

    def _terminate(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)  # No effect if it has exited.

    def close(self) -> None:
        """Leave no process and no descriptor behind."""
        self.kill()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def kill(self) -> None:
        """Kill the remaining ranks, and the children of all ranks in the process group."""
        self._killed = True
        for process in self._processes:
            with suppress(ProcessLookupError):  # No process of that group is left.
                os.killpg(process.pid, SIGKILL)
            process.wait()


def _start(spec: LaunchSpec, rank: int) -> "subprocess.Popen[str]":
    own_terminal = rank == 0
    return subprocess.Popen(
        spec.argv,
        env=spec.process_env(rank),
        stdin=subprocess.DEVNULL,
        stdout=None if own_terminal else subprocess.PIPE,
        stderr=None if own_terminal else subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ctrl-C at the terminal is for the launcher, which passes it on once.
        start_new_session=True,
        preexec_fn=die_with_parent(SIGKILL),
    )
