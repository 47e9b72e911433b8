"""The outcome of a run: exit codes of its ranks, the message of a failed one, its restarts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGABRT, Signals
from typing import Any

from toolkit.checkpoint.store import CheckpointStore
from toolkit.errors import (
    EXIT_FAILED,
    EXIT_UNAVAILABLE,
    EXIT_USER_ERROR,
)
from toolkit.run.directory import RunDirectory
from toolkit.run.events import PEER_LOST, cause_in, hang_of
from toolkit.text.redact import redact
from toolkit.text.terminal import tell

USER_CODES = (EXIT_USER_ERROR, EXIT_UNAVAILABLE)
"""Codes of mistakes and missing parts, which a worker reports itself."""
_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class RankExit:
    """How one rank ended. A negative code is the signal that killed it."""

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


def report_failure(
    run: RunDirectory, events: Sequence[Mapping[str, Any]], seen: Sequence[RankExit]
) -> tuple[int, str]:
    """Name the failed rank and show the end of its log. Return exit code and reason.

    Rank 0 has the terminal, so its output is not printed again. `events` are those of this
    launch. `seen` holds the ranks that were seen to fail first. A rank that failed only because
    it lost a peer is not blamed. It is named only if no other cause is known.
    """
    causes = [rank for rank in seen if not _lost_another(events, rank)]
    # NCCL's own thread aborts a rank that lost another: a rank that failed differently is the
    # cause.
    causes.sort(key=lambda rank: rank.code == -SIGABRT)
    failed = causes[0] if causes else _first_failure(events) or seen[0]
    code = failed.code if failed.code in USER_CODES else EXIT_FAILED
    outcome = code, failed.describe()
    if failed.rank == 0 and (failed.code in USER_CODES or _told(events, failed)):
        return outcome
    log = run.rank_log(failed.rank)
    if failed.code in USER_CODES and _told(events, failed):
        cause = cause_in(events)
        if cause and not _lost_another(events, RankExit(0, failed.code)):  # who has shown it
            tell(f"error: {cause['error']}")
        tell(f"{failed.describe()}; its log is {log}")
        return outcome
    tail = log_tail(log)
    shown = f"\n--- the end of {log} ---\n{tail}" if tail else ""
    tell(f"error: {failed.describe()}{shown}")
    return outcome


def _told(events: Sequence[Mapping[str, Any]], failed: RankExit) -> bool:
    """Whether the rank reported its failure, instead of dying silently."""
    end = {"kind": "end", "exit_code": failed.code, "rank": failed.rank}
    return any("error" in event and end.items() <= event.items() for event in events)


def _lost_another(events: Sequence[Mapping[str, Any]], failed: RankExit) -> bool:
    return any(e.get("rank") == failed.rank and e.get("error") == PEER_LOST for e in events)


def log_tail(path: Path) -> str:
    """The last lines of a log, secrets masked. Empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return redact("\n".join(text.splitlines()[-_TAIL_LINES:]))


def _first_failure(events: Sequence[Mapping[str, Any]]) -> RankExit | None:
    """The first rank that reported its failure, otherwise the first that lost another."""
    end = cause_in(events) or next((e for e in _ends(events) if e.get("error")), None)
    if end is None:
        return None
    return RankExit(int(end.get("rank", 0)), int(end.get("exit_code", EXIT_FAILED)))


def not_retryable(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rank reported a failure that would come again. Prints it."""
    found = any(event.get("retry") is False for event in _ends(events))
    if found:
        tell("not started again: it would not help, the message above says what may")
    return found


def newest_step(run: RunDirectory) -> int:
    """The step of the newest committed checkpoint. 0 without one."""
    return CheckpointStore(run.checkpoints, keep=1).newest_step()


def failure_reason(events: Sequence[Mapping[str, Any]], outcome: str) -> str:
    """Why a launch failed, in one line. A hang comes first, then a rank's error, then the
    launcher's reason.

    A killed rank reports nothing, but its peers report that they lost it.
    """
    worlds = [int(event.get("world", 0)) for event in events if event.get("kind") == "start"]
    hangs = [event for event in events if event.get("kind") == "hang"]
    if hangs:
        ranks, _ = hang_of(hangs, range(max(worlds, default=0)))
        who = f"rank {', '.join(map(str, ranks))} hung" if ranks else "all ranks waited"
        return f"{who} in step {max(int(event.get('step') or 0) for event in hangs) + 1}"
    if cause := cause_in(events):
        return f"rank {cause.get('rank', 0)}: {str(cause['error']).splitlines()[0]}"
    heard = {event.get("rank") for event in _ends(events) if event.get("error")}
    silent = [rank for rank in range(max(worlds, default=0)) if rank not in heard]
    who = f"rank {silent[0]}" if len(silent) == 1 else "a rank"
    if not heard or " was killed by " in outcome or outcome.startswith(f"{who} "):
        return outcome
    return f"{who} was killed, or its machine is gone"


def _ends(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("kind") == "end"]
