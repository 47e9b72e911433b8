"""`local`: DMT itself starts one process per rank on this machine."""

import sys
from signal import SIGKILL, SIGTERM

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
    STOPPING,
    Deadline,
    StopSignals,
    show_stacks,
    wake_if_stopped,
)
from toolkit.launchers.ranks import RankProcesses
from toolkit.run.ending import events_offset, grace_over
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
        supervised = _Supervised(spec)
        try:
            return supervised.wait(signals, spec.grace_s)
        finally:
            supervised.ranks.close()


class _Supervised:
    def __init__(self, spec: LaunchSpec) -> None:
        self._run_dir = spec.run_dir
        self._offset = events_offset(spec.run_dir)
        self._stopping = False
        self._failed: list[RankExit] = []
        self._deadline = Deadline()
        self.ranks = RankProcesses(spec, on_terminal=True)

    def wait(self, signals: StopSignals, grace_s: float) -> Outcome:
        """Return when all ranks have ended."""
        ranks = self.ranks
        while ranks.running():
            if signals.kill_requested:
                ranks.kill()
            if self._deadline.passed:
                message, code = grace_over(grace_s, self._run_dir, self._offset)
                if not self._failed:
                    tell(f"error: {message}")
                show_stacks(ranks.running())
                ranks.kill()
                if not self._failed and code == EXIT_RESUMABLE:
                    return Outcome(EXIT_RESUMABLE)
            if signals.stop_requested and not self._stopping:
                self._stopping = True
                tell(STOPPING)
                ranks.signal(SIGTERM)
                self._deadline.start(grace_s)
            self._note_failure()
            ranks.sleep_until_exit()
        self._note_failure()
        ranks.finish_logs()
        codes = ranks.codes()
        if self._failed:
            seen = self._failed
            if not ranks.killed:  # a large rank may be reaped after those that lost it
                seen = [*seen, *(RankExit(r, c) for r, c in enumerate(codes) if c == -SIGKILL)]
            if codes[0] in USER_CODES and codes[0] == seen[0].code:
                seen = [RankExit(0, codes[0])]  # found by all ranks, reported by this one
            return report_failure(self._run_dir, self._offset, seen)
        return Outcome(EXIT_DONE if set(codes) == {EXIT_DONE} else EXIT_RESUMABLE)

    def _note_failure(self) -> None:
        """Record the ranks that failed first, and terminate the others."""
        if self._failed:
            return
        harmless = {None, EXIT_DONE, EXIT_RESUMABLE}
        if self._stopping:
            # Stopped before its handler was set: there was nothing to save yet.
            harmless.add(-SIGTERM)
        if any(code not in harmless for code in self.ranks.codes()):
            # Checked again: a rank that exits because it lost another is seen after that one.
            self._failed = [
                RankExit(rank, code)
                for rank, code in enumerate(self.ranks.codes())
                if code and code not in harmless
            ]
            self._end_others()
        elif -SIGTERM in self.ranks.codes():
            self._end_others()

    def _end_others(self) -> None:
        if not self._stopping:
            self._stopping = True
            self.ranks.signal(SIGTERM)
        for pid in self.ranks.running():
            wake_if_stopped(pid)
        self._deadline.start(FAILED_GRACE_S)
