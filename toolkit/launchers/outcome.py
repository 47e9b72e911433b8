"""The outcome of a run: exit codes of its ranks, and the message of a failed one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGABRT, Signals
from typing import Any

from toolkit.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    EXIT_UNAVAILABLE,
    EXIT_USER_ERROR,
)
from toolkit.launchers.base import Outcome
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import PEER_LOST, cause_of, stopped_at
from toolkit.run.recorded import read_events
from toolkit.text.redact import redact
from toolkit.text.terminal import tell

USER_CODES = (EXIT_USER_ERROR, EXIT_UNAVAILABLE)
"""Codes of mistakes and missing parts, which a worker reports itself."""
_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class RankExit:
    """How one rank ended; a negative code is the signal that killed it."""

    rank: int
    code: int

    def describe(self) -> str:
        """Return e.g. `rank 1 was killed by SIGKILL`."""
        if self.code >= 0:
            return f"rank {self.rank} failed with exit code {self.code}"
        try:
            name = Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"rank {self.rank} was killed by {name}"


def failure_code(code: int) -> int:
    """Map a failed rank's code: user error (2) and missing parts (3) stay, the rest is 4."""
    return code if code in USER_CODES else EXIT_FAILED


def report_failure(run_dir: Path, offset: int, seen: Sequence[RankExit]) -> Outcome:
    """Name the failed rank and show the end of its log.

    Rank 0 has the terminal: its output there is not printed again. `offset`: where the events
    of this launch begin. `seen`: the ranks that were seen to fail first. Ranks that only lost
    another are not named if another one failed by itself or reported a reason.
    """
    events = read_events(RunDirectory(run_dir).events, offset)
    causes = [rank for rank in seen if not _lost_another(events, rank)]
    # NCCL's own thread aborts a rank that lost another: a rank that failed differently is the
    # cause.
    causes.sort(key=lambda rank: rank.code == -SIGABRT)
    failed = causes[0] if causes else _first_failure(events) or seen[0]
    outcome = Outcome(failure_code(failed.code), failed.describe())
    if failed.rank == 0 and (failed.code in USER_CODES or _told(events, failed)):
        return outcome
    log = RunDirectory(run_dir).rank_log(failed.rank)
    if failed.code in USER_CODES and _told(events, failed):
        if not _lost_another(events, RankExit(0, failed.code)):  # otherwise rank 0 has shown it
            tell(f"error: {cause_of(run_dir, offset)}")
        tell(f"{failed.describe()}; its log is {log}")
        return outcome
    tail = log_tail(log)
    shown = f"\n--- the end of {log} ---\n{tail}" if tail else ""
    tell(f"error: {failed.describe()}{shown}")
    return outcome


def _told(events: Sequence[Mapping[str, Any]], failed: RankExit) -> bool:
    """Whether the rank reported why it failed, or died silently."""
    end = {"kind": "end", "exit_code": failed.code, "rank": failed.rank}
    return any("error" in event and end.items() <= event.items() for event in events)


def _lost_another(events: Sequence[Mapping[str, Any]], failed: RankExit) -> bool:
    return any(e.get("rank") == failed.rank and e.get("error") == PEER_LOST for e in events)


def log_tail(path: Path) -> str:
    """The last lines of a log, secrets masked; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return redact("\n".join(text.splitlines()[-_TAIL_LINES:]))


def outcome_from_events(
    run_dir: Path, offset: int, launcher_code: int, stop_requested: bool
) -> Outcome:
    """Report how a run under another launcher ended.

    torchrun and deepspeed do not report which rank ended how, so the workers' own `end` events
    name the first failure. A worker that saved and stopped means a stopped run only if the stop
    was requested here: these launchers also stop the other workers if one was killed.
    """
    if launcher_code == EXIT_DONE:
        return Outcome(EXIT_DONE)  # perhaps after its own restarts
    events = read_events(RunDirectory(run_dir).events, offset)
    starts = [index for index, event in enumerate(events) if event.get("kind") == "start"]
    events = events[starts[-1] if starts else 0 :]  # the launcher may have restarted the ranks
    if failed := _first_failure(events):
        return report_failure(run_dir, offset, [failed])
    if launcher_code == EXIT_RESUMABLE:
        return Outcome(launcher_code)
    saved = stopped_at(events) is not None
    nothing_started = all(event.get("kind") != "start" for event in events)
    if stop_requested and (saved or nothing_started):
        return Outcome(EXIT_RESUMABLE)
    reason = f"the launcher ended with code {launcher_code}"
    tell(f"error: {reason}; its messages are above")
    return Outcome(failure_code(launcher_code), reason)


def has_failed(run_dir: Path, offset: int) -> bool:
    """Whether a rank of this launch has reported a failure."""
    return _first_failure(read_events(RunDirectory(run_dir).events, offset)) is not None


def has_started(run_dir: Path, offset: int) -> bool:
    """Whether the ranks of this launch have started training."""
    events = read_events(RunDirectory(run_dir).events, offset)
    return any(event.get("kind") == "start" for event in events)


def _first_failure(events: Sequence[Mapping[str, Any]]) -> RankExit | None:
    """The first rank that reported why it failed, otherwise the first that lost another."""
    ends = [event for event in events if event.get("kind") == "end"]
    failed = [e for e in ends if e.get("exit_code") not in (EXIT_DONE, EXIT_RESUMABLE, None)]
    failed.sort(key=lambda event: event.get("error") == PEER_LOST)
    if not failed:
        return None
    return RankExit(rank=int(failed[0].get("rank", 0)), code=int(failed[0]["exit_code"]))
