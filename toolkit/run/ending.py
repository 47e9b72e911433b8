"""How a run ends, in the words and signals that its launcher and its ranks share."""

import signal
from pathlib import Path

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory

STACKS_SIGNAL = signal.SIGUSR2
"""A training rank answers it with the stacks of all its threads, in its log, and continues."""
PEER_LOST = "lost contact with another rank, whose message or log has the reason"
"""What a rank says of a failure that began elsewhere."""


def grace_over(grace_s: float) -> str:
    """What the user reads when ranks are killed although they may still be saving."""
    return f"not saved and gone within launch.grace_s ({grace_s:g} s): killed"


def events_offset(run_dir: Path) -> int:
    """Return the present end of events.jsonl: events behind it belong to this launch."""
    events = RunDirectory(run_dir).events
    return events.stat().st_size if events.exists() else 0


def cause_of(run_dir: Path, offset: int) -> str | None:
    """What the first rank said that failed by itself, in events behind `offset`."""
    events = jsonl.read(RunDirectory(run_dir).events, offset)
    said = [event.get("error") for event in events if event.get("kind") == "end"]
    return next((str(error) for error in said if error and error != PEER_LOST), None)
