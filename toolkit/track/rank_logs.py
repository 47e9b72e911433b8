"""What every rank writes of its own, a line per step: what it waited for, what it trained on.

Ranks wait for each other in every step, so the time of a step is the same on all of them. The
waits in `ranks/rank-N.jsonl` do not depend on other ranks: the rank that waits longest delays
the rest. Nothing is exchanged between ranks.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory

_SCHEDULER = Path("/proc/thread-self/schedstat")
"""Nanoseconds of the calling thread on a core and waiting for one (Linux)."""


class RankWaits:
    """Appends to `ranks/rank-N.jsonl`; made and called by the thread that trains."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        with suppress(OSError):  # another rank makes it, too; `write` says what is wrong
            run.ranks.mkdir(exist_ok=True)
        self.path = run.ranks / f"rank-{rank}.jsonl"
        self._core_wait_s = core_wait_s()

    def write(self, step: int, data_waits_s: Sequence[float]) -> None:
        """Append the means, in seconds per step, over the steps since the last line.

        `data_waits_s`: what this rank waited for micro batches in each. `core_wait_s`: time in
        which the training thread was runnable but got no core; null if unknown.
        """
        steps, before, self._core_wait_s = len(data_waits_s), self._core_wait_s, core_wait_s()
        waited_s = None
        if before is not None and self._core_wait_s is not None:
            waited_s = round((self._core_wait_s - before) / steps, 6)
        data_wait_s = round(sum(data_waits_s) / steps, 6)
        line = {"step": step, "data_wait_s": data_wait_s, "core_wait_s": waited_s}
        jsonl.append_where_room(self.path, line)


def core_wait_s() -> float | None:
    """Seconds that this thread has waited for a core so far; None if the system or container
    does not report it. Source: Linux, Documentation/scheduler/sched-stats.rst."""
    try:
        return int(_SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class SampleLog:
    """Appends to `samples/rank-N.jsonl`: which samples a rank trained on.

    Ranks that work on the same data (tensor, context and pipeline parallel) write the same
    lines. Read together, each (step, data rank) counted once, they are the order in which data
    was consumed.
    """

    def __init__(self, run: RunDirectory, rank: int, data_rank: int) -> None:
        run.samples.mkdir(exist_ok=True)
        self.path = run.samples / f"rank-{rank}.jsonl"
        self.data_rank = data_rank

    def write(self, step: int, samples: Sequence[int]) -> None:
        """Append the indices, in the training data, of what this step trained on."""
        jsonl.append(self.path, {"step": step, "data_rank": self.data_rank, "samples": samples})
