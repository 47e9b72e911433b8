"""`ranks/rank-N.jsonl`: each rank's own waits, one line per logged step.

Ranks wait for each other in every step, so the time of a step is the same on all of them. The
waits written here do not depend on other ranks: the rank that waits longest delays the rest.
Each rank writes its own file; nothing is exchanged between ranks.
"""

from contextlib import suppress
from pathlib import Path

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory

_SCHEDULER = Path("/proc/thread-self/schedstat")
"""Nanoseconds of the calling thread on a core and waiting for one (Linux)."""


class RankWaits:
    """Appends to the file of one rank; made and called by the thread that trains."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        with suppress(OSError):  # another rank makes it, too; `write` says what is wrong
            run.ranks.mkdir(exist_ok=True)
        self.path = run.ranks / f"rank-{rank}.jsonl"
        self._core_wait_s = core_wait_s()

    def write(self, step: int, steps: int, data_wait_s: float) -> None:
        """Append the means, in seconds per step, over the last `steps` steps.

        `data_wait_s`: all that this rank waited for micro batches in them. `core_wait_s`: time
        in which the training thread was runnable but got no core; null if unknown.
        """
        before, self._core_wait_s = self._core_wait_s, core_wait_s()
        known = before is not None and self._core_wait_s is not None
        waited_s = (self._core_wait_s or 0.0) - (before or 0.0)
        line = {
            "step": step,
            "data_wait_s": round(data_wait_s / steps, 6),
            "core_wait_s": round(waited_s / steps, 6) if known else None,
        }
        jsonl.append_where_room(self.path, line)


def core_wait_s() -> float | None:
    """Seconds that this thread has waited for a core so far; None if the system or container
    does not report it. Source: Linux, Documentation/scheduler/sched-stats.rst."""
    try:
        return int(_SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
