"""Where a run became slower, and which rank held up the others."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.report.attempts import amount, number, step_of

WAITS = {"data_wait_s": "waited for data", "core_wait_s": "waited for a core"}
"""What ranks record of their own, and the words for it."""
_SLOWER = 1.3
"""From this ratio of step times on, a run has slowed down."""
_EXPLAINS = 0.3
"""Share of the additional time from which on a rank's own wait is named as the cause."""
_HELD_UP = 0.1
"""Share of the step time from which on a rank that waits longest is named."""
_WINDOW = 20
"""Logged lines, before and after, whose medians are compared."""
_FEWEST = 4
_ALIKE = 0.8
"""Share of the lines on each side of a slow-down that are on its side of the step time."""

RankLines = Mapping[int, Sequence[Mapping[str, Any]]]
"""Rank → the lines of its file."""


@dataclass(frozen=True)
class SlowDown:
    """Steps that take longer than those before."""

    step: int
    """The last logged step that was as fast as before."""
    before_s: float
    after_s: float
    """Median seconds per step."""

    @property
    def ratio(self) -> float:
        """Of the step times, after over before."""
        return self.after_s / self.before_s


@dataclass(frozen=True)
class Straggler:
    """The rank with the longest wait of its own, next to what is usual; seconds per step."""

    rank: int
    what: str
    """A key of WAITS."""
    own_s: float
    usual_s: float
    """Its own before the slow-down; without one, `others_s`."""
    others_s: float
    """Of the rank in the middle of the others."""


def slow_down(metrics: Sequence[Mapping[str, Any]]) -> SlowDown | None:
    """The largest lasting one; None for a run of an even pace. The first line warms up."""
    lines = [
        (step, each)
        for line in metrics[1:]
        if (step := step_of(line)) is not None and (each := amount(line, "step_time_s"))
    ]
    times = [each for _, each in lines]
    best, found = 0.0, None
    for at in range(_FEWEST, len(times) - _FEWEST + 1):
        if times[at] < _SLOWER * times[at - 1]:
            continue  # it begins with a slow line behind a fast one
        before, after = times[max(0, at - _WINDOW) : at], times[at : at + _WINDOW]
        one = SlowDown(lines[at - 1][0], statistics.median(before), statistics.median(after))
        between = math.sqrt(one.before_s * one.after_s)
        alike = min(
            sum(each < between for each in before) / len(before),
            sum(each > between for each in after) / len(after),
        )
        score = alike * math.log(one.ratio)
        if one.ratio >= _SLOWER and alike >= _ALIKE and score > best:
            best, found = score, one
    return found


def straggler(
    ranks: RankLines, first: float = 0, last: float = float("inf")
) -> Straggler | None:
    """The rank whose wait in steps behind `first` up to `last` is furthest above the usual."""
    found = []
    for what in WAITS:
        means = {rank: _mean(ranks[rank], what, first, last) for rank in ranks}
        for rank, own_s in means.items():
            others_s = statistics.median([means[one] for one in means if one != rank] or [0.0])
            usual_s = _mean(ranks[rank], what, 0, first) if first else others_s
            found.append(Straggler(rank, what, own_s, usual_s, others_s))
    return max(found, key=lambda one: one.own_s - one.usual_s, default=None)


def _mean(lines: Sequence[Mapping[str, Any]], what: str, first: float, last: float) -> float:
    """Of the steps behind `first` up to `last`; 0 where nothing is recorded."""
    values = [
        value
        for line in lines
        if first < (number(line, "step") or 0) <= last
        if (value := amount(line, what)) is not None
    ]
    return statistics.fmean(values) if values else 0.0


def pace(metrics: Sequence[Mapping[str, Any]], ranks: RankLines) -> list[str]:
    """Sentences: where the run slowed down and why, and which rank holds up the others."""
    slower = slow_down(metrics)
    if slower is None:
        times = [each for line in metrics[1:] if (each := amount(line, "step_time_s"))]
        one = straggler(ranks)
        if one is None or not times or len(ranks) < 2:
            return []
        if one.own_s - one.usual_s < _HELD_UP * statistics.median(times):
            return []
        return [f"{_named(one)} per step, longer than the others ({one.others_s:.3g} s)"]
    said = (
        f"after step {slower.step:,} steps took {slower.ratio:.1f}× as long "
        f"({slower.after_s:.3g} s instead of {slower.before_s:.3g} s)"
    )
    one = straggler(ranks, slower.step, _end(metrics, slower))
    if one is None:
        return [f"{said}; what ranks waited for was not recorded"]
    explains_s = _EXPLAINS * (slower.after_s - slower.before_s)
    if one.own_s - one.usual_s < explains_s:
        whose = f"none of the {len(ranks)} ranks whose waits are known"
        return [f"{said}; {whose} waited long enough for data or a core to explain it"]
    which = _named(one)
    if one.others_s - one.usual_s >= explains_s:
        which = f"ranks {WAITS[one.what]}, rank {one.rank} longest, {one.own_s:.3g} s"
    return [f"{said}: {which} per step, {one.usual_s:.3g} s before"]


def measured(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences of the last event of each straggler, and of the last move of samples."""
    found = {
        (event.get("kind"), event.get("slow_rank")): str(event.get("message", ""))
        for event in events
        if event.get("kind") in ("straggler", "balance")
    }
    return [*found.values()]


def _named(one: Straggler) -> str:
    return f"rank {one.rank} {WAITS[one.what]}, {one.own_s:.3g} s"


def _end(metrics: Sequence[Mapping[str, Any]], slower: SlowDown) -> float:
    """The last step of the lines that were compared."""
    steps = [step for line in metrics if (step := step_of(line) or 0) > slower.step]
    return steps[min(len(steps), _WINDOW) - 1]
