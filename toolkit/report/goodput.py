"""Where the time of a run went: training that counts, and what was lost, by cause.

    begin      launch, or a launcher's restart, of each start
    start-up   until the training loop begins, less loading
    loading    reading a checkpoint
    training   the time of every step of metrics.jsonl, each step once
    replayed   steps that were done again after a kill
    saving     training stood still for a save
    skipped    steps whose update was skipped
    evaluation validation, which is wanted but trains nothing
    hung       from the halt of a rank until its run was ended, or started again

What is left is not accounted: waiting between these, writing logs, exporting, and the first
doing of steps beyond what was replayed. Time in which nothing ran (between a stop and the next
`dmt launch`) is not part of the run.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from toolkit.report.attempts import (
    Attempt,
    Event,
    attempts,
    number,
    step_of,
    windows,
)

Metrics = Mapping[str, Any]

PARTS = {
    "productive": "productive",
    "start_up": "start-up and restarts",
    "loading": "loading checkpoints",
    "replayed": "replayed steps",
    "saving": "saving (stalls)",
    "skipped": "skipped batches",
    "evaluation": "evaluation",
    "hung": "hangs and detection",
    "not_accounted": "not accounted",
}
"""What the time of a run is divided into, in the order of the report, and how it names them."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of all starts of a run, by part."""

    total_s: float
    parts_s: Mapping[str, float]
    """Seconds by name of `PARTS`, which add up to `total_s`."""
    idle_s: float
    """Seconds between starts, when nothing ran. Not in `total_s`."""

    @property
    def share(self) -> float | None:
        """Productive time over all time. None before anything has run."""
        return self.parts_s["productive"] / self.total_s if self.total_s > 0 else None

    def percentages(self) -> dict[str, float]:
        """Share of each part, to a tenth."""
        return {name: round(100 * self.parts_s[name] / self.total_s, 1) for name in PARTS}


def goodput(events: Sequence[Event], metrics: Sequence[Metrics]) -> Goodput:
    """Divide the time of a run."""
    found = attempts(events)
    steps_s = _steps_s(metrics)
    spans = list(windows(found, _unlogged_tail_s(found, steps_s)))
    skipped = _skipped_s(found, steps_s)
    parts = {
        "productive": sum(count * each for count, each in steps_s.values()) - skipped,
        "start_up": sum(
            max(0.0, (one.started or end) - begin - one.seconds("load"))
            for one, begin, end in spans
        ),
        "loading": sum(one.seconds("load") for one in found),
        "replayed": sum(one.seconds("replay") for one in found),
        "saving": sum(one.seconds("save", "stall_s") for one in found),
        "skipped": skipped,
        "evaluation": sum(one.seconds("evaluation") for one in found),
        "hung": sum(max(0.0, end - max(begin, one.hung or end)) for one, begin, end in spans),
    }
    known = sum(parts.values())
    # The clock of a machine may be set back; what was measured was spent.
    total = max(known, sum(end - begin for _, begin, end in spans))
    idle = sum(max(0.0, after[1] - before[2]) for before, after in pairwise(spans))
    return Goodput(total, {**parts, "not_accounted": total - known}, idle)


def _steps_s(metrics: Sequence[Metrics]) -> dict[int, tuple[int, float]]:
    """For the last step of each line: how many steps it covers, and seconds per step."""
    found: dict[int, tuple[int, float]] = {}
    before = 0
    for line in metrics:
        step, each = step_of(line), number(line, "step_time_s")
        if step is None or each is None or step <= before:
            continue
        found[step] = (step - before, each)
        before = step
    return found


def _unlogged_tail_s(
    found: Sequence[Attempt], steps_s: Mapping[int, tuple[int, float]]
) -> float:
    """How long the last start trained after its last event, according to its metrics."""
    last = found[-1].step if found else 0
    ends = steps_s.items() if found else ()
    return sum(min(count, step - last) * each for step, (count, each) in ends if step > last)


def _skipped_s(found: Sequence[Attempt], steps_s: Mapping[int, tuple[int, float]]) -> float:
    """Seconds of skipped steps. Each takes as long as the other steps of its line."""
    lasts = [*steps_s]
    spent = 0.0
    steps = {step_of(event) for one in found for event in one.of("skip")}
    for step in filter(None, steps):
        at = bisect_left(lasts, step)
        count, each = steps_s[lasts[at]] if at < len(lasts) else (0, 0.0)
        spent += each if count and step > lasts[at] - count else 0.0
    return spent
