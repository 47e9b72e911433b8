"""Messages and signals about the end of a run, shared by its launcher and its ranks."""

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STACKS_SIGNAL = signal.SIGUSR2
"""On this signal, a training rank writes the stacks of all its threads to its log and
continues."""
PEER_LOST = "lost contact with another rank, whose message or log has the reason"
"""A rank's message about a failure that started elsewhere."""
_MOST_NAMED = 8
"""Ranks, or places in the code, that a message lists."""


def cause_in(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The `end` of the first rank that failed by itself."""
    told = (event for event in events if event.get("kind") == "end" and event.get("error"))
    return next((event for event in told if event["error"] != PEER_LOST), None)


def hang_of(hangs: Sequence[Mapping[str, Any]], ranks: Iterable[int]) -> tuple[list[int], str]:
    """Which of `ranks` hang, as far as the ranks' `hang` events show, and the message.

    Those are the silent ranks: a stopped or frozen rank writes no event. If none is silent,
    those behind the others. None if all wait in the same step, where their lines distinguish
    them.
    """
    by_rank = {int(event.get("rank") or 0): event for event in hangs}
    marks = {rank: int(event.get("marks") or 0) for rank, event in by_rank.items()}
    silent = [rank for rank in ranks if rank not in by_rank]
    behind = [rank for rank in sorted(marks) if marks[rank] < max(marks.values())]
    if silent:
        message = f"stopped or frozen: rank {_numbers(silent)}"
    elif behind:
        doing = [
            f"rank {rank} in {by_rank[rank].get('doing')}" for rank in behind[:_MOST_NAMED]
        ]
        message = f"behind the others: {', '.join(doing)}"
    else:
        message = "all ranks live and have come as far as each other"
    places: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        places.setdefault(str(by_rank[rank].get("where")), []).append(rank)
    where = [f"rank {_numbers(found)} at {place}" for place, found in places.items()]
    step = max((int(event.get("step") or 0) for event in hangs), default=0)
    message += f" ({step} steps done); {', '.join(where[:_MOST_NAMED])}"
    return silent or behind, message


def _numbers(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" * (len(ranks) > _MOST_NAMED)
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + more
