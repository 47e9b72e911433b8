"""The record of a Ray job, a file of the run directory: each attempt, and how its ranks ended.

All machines share the run directory, and it outlives every worker.
"""

from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE
from toolkit.launchers.outcome import RankExit
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.recorded import read_events


class RayAttempt(NamedTuple):
    """One start of all ranks."""

    offset: int
    """Where its events begin."""
    step: int
    """The newest checkpoint when it began."""
    world: int
    """Number of ranks."""
    failed: list[RankExit]
    """The ranks that have failed, the first one first."""

    @property
    def reason(self) -> str:
        """Why it failed."""
        return self.failed[0].describe() if self.failed else "Ray lost a worker"


class RayRecord:
    """The record of one launch."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._file = run.handed_over.with_name("ray.jsonl")

    def clear(self) -> None:
        """Forget the launch before."""
        self._file.unlink(missing_ok=True)

    def begin(self, offset: int, step: int, world: int) -> None:
        """Note that the ranks are about to start; see RayAttempt."""
        note = {"offset": offset, "step": step, "world": world}
        jsonl.append_where_room(self._file, note)

    def end(self, one: RankExit) -> None:
        """Note how a rank ended."""
        jsonl.append_where_room(self._file, {"rank": one.rank, "code": one.code})

    def attempts(self) -> list[RayAttempt]:
        """The attempts so far."""
        found: list[RayAttempt] = []
        with suppress(OSError):  # of a shared disk; the next look may do better
            for line in jsonl.read(self._file):
                if "offset" in line:
                    found.append(RayAttempt(line["offset"], line["step"], line["world"], []))
                elif found and line["code"] not in (EXIT_DONE, EXIT_RESUMABLE):
                    found[-1].failed.append(RankExit(line["rank"], line["code"]))
        return found

    def at_work(self) -> bool:
        """Whether the ranks train: they have something to save, and can."""
        last = self.attempts()[-1:]
        if not last or last[0].failed:
            return False
        with suppress(OSError):
            events = read_events(self._run.events, last[0].offset)
            return any(event["kind"] == "start" for event in events)
        return True


def restarts_in_a_row(attempts: list[RayAttempt], step: int, world: int) -> int:
    """How many of the last restarts began at this checkpoint with as many ranks. Ray also
    restarts all ranks when their number changes, which is no failure."""
    restarts = reversed(attempts[1:])
    return sum(
        1 for _ in takewhile(lambda one: (one.step, one.world) == (step, world), restarts)
    )
