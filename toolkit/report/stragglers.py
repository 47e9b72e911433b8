"""The rank that held up the others."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.report.attempts import amount

WAITS = {"data_wait_s": "waited for data", "core_wait_s": "waited for a core"}
"""Waits that ranks record of their own, and the words for them."""
_HELD_UP = 0.1
"""Share of the step time from which on the rank that waits longest is named."""

RankLines = Mapping[int, Sequence[Mapping[str, Any]]]
"""Rank → the lines of its file."""


def _mean(lines: Sequence[Mapping[str, Any]], what: str) -> float:
    """The mean of a wait, 0 where nothing is recorded."""
    values = [value for line in lines if (value := amount(line, what)) is not None]
    return statistics.fmean(values) if values else 0.0


def pace(metrics: Sequence[Mapping[str, Any]], ranks: RankLines) -> list[str]:
    """A sentence on the rank whose wait is furthest above that of the others, if it holds
    them up."""
    times = [each for line in metrics[1:] if (each := amount(line, "step_time_s"))]
    waits = []
    for what, words in WAITS.items():
        means = {rank: _mean(lines, what) for rank, lines in ranks.items()}
        for rank, own_s in means.items():
            if others := [mean for other, mean in means.items() if other != rank]:
                usual_s = statistics.median(others)
                said = f"rank {rank} {words}, {own_s:.3g} s per step, longer than the others"
                waits.append((own_s - usual_s, f"{said} ({usual_s:.3g} s)"))
    longest_s, said = max(waits, default=(0.0, ""))
    is_held_up = times and longest_s >= _HELD_UP * statistics.median(times)
    return [said] if said and is_held_up else []


def measured(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences of the last event of each straggler, and of the last move of samples."""
    found = {
        (event.get("kind"), event.get("slow_rank")): str(event.get("message", ""))
        for event in events
        if event.get("kind") in ("straggler", "balance")
    }
    return [*found.values()]
