"""The rank that held up the others."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.report.attempts import amount

WAITS = {"data_wait_s": "waited for data", "core_wait_s": "waited for a core"}
"""Waits that ranks record of their own, and the words for them."""
_HELD_UP = 0.1
"""Share of the step time from which on the rank that waits longest is named."""

RankLines = Mapping[int, Sequence[Mapping[str, Any]]]
"""Rank → the lines of its file."""


@dataclass(frozen=True)
class Straggler:
    """The rank with the longest wait of its own, in seconds per step."""

    rank: int
    what: str
    """A key of WAITS."""
    own_s: float
    others_s: float
    """Wait of the rank in the middle of the others."""


def straggler(ranks: RankLines) -> Straggler | None:
    """The rank whose wait is furthest above that of the others."""
    waits = [
        Straggler(rank, what, own_s, statistics.median(others))
        for what in WAITS
        for means in [{rank: _mean(lines, what) for rank, lines in ranks.items()}]
        for rank, own_s in means.items()
        if (others := [mean for other, mean in means.items() if other != rank])
    ]
    return max(waits, key=lambda one: one.own_s - one.others_s, default=None)


def _mean(lines: Sequence[Mapping[str, Any]], what: str) -> float:
    """The mean of a wait, 0 where nothing is recorded."""
    values = [value for line in lines if (value := amount(line, what)) is not None]
    return statistics.fmean(values) if values else 0.0


def pace(metrics: Sequence[Mapping[str, Any]], ranks: RankLines) -> list[str]:
    """A sentence on the rank that holds up the others, if there is one."""
    times = [each for line in metrics[1:] if (each := amount(line, "step_time_s"))]
    one = straggler(ranks)
    if one is None or not times:
        return []
    if one.own_s - one.others_s < _HELD_UP * statistics.median(times):
        return []
    waited = f"rank {one.rank} {WAITS[one.what]}, {one.own_s:.3g} s per step"
    return [f"{waited}, longer than the others ({one.others_s:.3g} s)"]


def measured(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences of the last event of each straggler, and of the last move of samples."""
    found = {
        (event.get("kind"), event.get("slow_rank")): str(event.get("message", ""))
        for event in events
        if event.get("kind") in ("straggler", "balance")
    }
    return [*found.values()]
