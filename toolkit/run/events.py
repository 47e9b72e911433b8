"""`events.jsonl`: what happened to a run, one object per event."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]  # has no type hints of its own

from toolkit.run import jsonl

EventKind = Literal[
    "launch",
    "import",
    "change",
    "start",
    "load",
    "save",
    "export",
    "resume",
    "restart",
    "replay",
    "resize",
    "hang",
    "failure",
    "skip",
    "evaluation",
    "early_stop",
    "prediction",
    "outer",
    "straggler",
    "balance",
    "signal",
    "warning",
    "end",
]

VALIDATION = "validation/"
"""How the names of the losses of validation sources begin in an `evaluation` event."""
PEER_LOST = "lost contact with another rank, whose message or log has the reason"
"""A rank's message about a failure that started elsewhere."""
_MOST_NAMED = 8
"""Ranks, or places in the code, that a message lists."""


class EventLog:
    """Appends to `events.jsonl`. Any process of the run may: a line is one write.

    Launchers and the trackers read these events; they rely on

    - `end` with `exit_code` (and `rank`, and `error` when it failed): written by rank 0
      however the run ends, and by any other rank that fails; `retry: false` where another
      start would meet the same failure, or do harm;
    - `launch` when `dmt launch` was started, `start` (with `seconds` since the process began,
      and those of each of rank 0's `phases`) when the first step is ready, `restart` when a
      run that failed is started again (with `attempt`, `reason` and `from_step`), `replay`
      where steps are done again (`from_step` to `to_step`, which took `seconds`), `hang` by
      each rank that ends because one hangs (`doing`, `where`, its number of `marks`);
    - `load` (with its `seconds`) when a checkpoint was loaded;
    - `import` (with `message`) when `dmt checkpoint import` wrote the checkpoint of another
      tool that the run continues from;
    - `change` (with `key`, `now` and a `message`) when `dmt launch --change` gave a running
      schedule or optimizer another setting;
    - `resize` where an elastic run continues after a machine was lost or has joined (`from` and
      `to`, ranks, and `idle_s` since a step was logged);
    - `failure` (with `exit_code` and `reason`) when the ranks of a launch have failed: what the
      launcher printed, also of a rank that was killed and wrote nothing;
    - `early_stop` (with a `message`, `best_step` and `best_loss`) where the validation losses
      have ended a run before its last step; its `end` is that of a finished one;
    - `export` when RUN/export is complete;
    - `outer` when weights were exchanged with the other replicas (with `seconds`, and the
      number of `replicas`), or this one has `joined` (its number);
    - `straggler` (with `slow_rank`, `host`, how many times `slower` than the others,
      `since_step` and a `message`) when a rank is slow, `balance` (with `shares`, `from_step`,
      `speeds` and a `message`) when samples move between data-parallel ranks;
    - `step` (optimizer steps done) in every event that belongs to a step.
    """

    def __init__(self, path: Path, begins: int | None = None) -> None:
        """`begins`: the byte at which the events of this launch begin. Default: the end of the
        file as it is."""
        self.path = path
        size = path.stat().st_size if path.exists() else 0
        self.begins = size if begins is None else begins

    def new(self) -> list[dict[str, Any]]:
        """The events of this launch. Raises OSError."""
        return jsonl.read(self.path, self.begins)

    def write(self, kind: EventKind, **fields: Any) -> None:
        """Append the event with the present time (UTC, ISO 8601), unless `time` is given in
        seconds since 1970. Texts are redacted. Raises nothing on a full disk: an event
        must not end a run, nor hide the error that it is about."""
        at = datetime.fromtimestamp(fields.pop("time", time.time()), UTC)
        stamp = at.isoformat(timespec="milliseconds")
        jsonl.append_where_room(self.path, {"time": stamp, "kind": kind, **fields})


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


def process_age_s() -> float:
    """Seconds since this process was started, Python's own start included."""
    return max(0.0, time.time() - float(psutil.Process().create_time()))
