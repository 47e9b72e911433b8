"""`events.jsonl`: what happened to a run, one object per event."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from toolkit.train import jsonl

EventKind = Literal[
    "start",
    "load",
    "save",
    "resume",
    "restart",
    "skip",
    "evaluation",
    "prediction",
    "signal",
    "warning",
    "end",
]


class EventLog:
    """Appends to `events.jsonl`. Any process of the run may: a line is one write.

    Launchers and the W&B follower read these events; they rely on

    - `end` with `exit_code` (and `rank`, and `error` when it failed): written by rank 0
      however the run ends, and by any other rank that fails;
    - `step` (optimizer steps done) in every event that belongs to a step.
    """

    def __init__(self, path: Path) -> None:
        jsonl.mend_tail(path)
        self.path = path

    def write(self, kind: EventKind, **fields: Any) -> None:
        """Append the event with the present time (UTC, ISO 8601); texts are redacted."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        jsonl.append(self.path, {"time": now, "kind": kind, **fields})
