"""The processes of one rehearsed layout: started, watched, and ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.launchers.base import Job, LaunchSpec
from toolkit.launchers.local import LocalStarter
from toolkit.launchers.outcome import RankExit, log_tail
from toolkit.launchers.process import Deadline, StopSignals
from toolkit.launchers.ranks import RankProcesses
from toolkit.recipe.schema import ClusterSection
from toolkit.run.directory import RunDirectory


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


def run_ranks(spec: LaunchSpec, limit_s: float) -> Failure | None:
    """Start the ranks and wait until all have exited. None if all succeeded.

    The first failure ends the others, and so does the time limit. Call it in the main thread.
    A stop signal also ends the ranks, and then raises KeyboardInterrupt.
    """
    # Flags, because an exception would be lost where a process forks: Python prints what is
    # raised in hooks such as logging's, and continues.
    with StopSignals() as signals:
        ranks = RankProcesses(spec, on_terminal=False)
        try:
            failure = _wait(ranks, RunDirectory(spec.run_dir), signals, limit_s)
        finally:
            ranks.close()
    if signals.stop_requested:
        raise KeyboardInterrupt
    return failure


def _wait(
    ranks: RankProcesses, run: RunDirectory, signals: StopSignals, limit_s: float
) -> Failure | None:
    deadline = Deadline()
    deadline.start(limit_s)
    while not signals.stop_requested:
        codes = ranks.codes()
        failed = [RankExit(rank, code) for rank, code in enumerate(codes) if code]
        if not failed and None not in codes:
            return None
        if failed or deadline.passed:
            ranks.kill()
            ranks.finish_logs()
            log = _log(run, failed[0].rank if failed else codes.index(None))
            if not failed:
                return Failure(f"no end after {limit_s:g} s", log)
            # A worker's last line is its error; a killed one has none.
            said = log.rpartition("\n")[2] if failed[0].code > 0 else ""
            return Failure(said or failed[0].describe(), log)
        ranks.sleep_until_exit()
    return None


def _log(run: RunDirectory, rank: int) -> str:
    """The last lines that a rank printed, secrets masked."""
    lines = log_tail(run.rank_log(rank)).splitlines()
    return "\n".join(line for line in lines if line.strip())
