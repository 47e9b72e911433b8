"""Messages and signals about the end of a run, shared by its launcher and its ranks."""

import signal
from pathlib import Path

from toolkit.run.directory import RunDirectory
from toolkit.run.recorded import read_events

STACKS_SIGNAL = signal.SIGUSR2
"""On this signal, a training rank writes the stacks of all its threads to its log and
continues."""
PEER_LOST = "lost contact with another rank, whose message or log has the reason"
"""A rank's message about a failure that started elsewhere."""


def grace_over(grace_s: float) -> str:
    """The message if ranks are killed although they may still be saving."""
    return f"not saved and gone within launch.grace_s ({grace_s:g} s): killed"


def events_offset(run_dir: Path) -> int:
    """Return the current end of events.jsonl: later events belong to this launch."""
    events = RunDirectory(run_dir).events
    return events.stat().st_size if events.exists() else 0


def cause_of(run_dir: Path, offset: int) -> str | None:
    """The error of the first rank that failed by itself, in events after `offset`."""
    events = read_events(RunDirectory(run_dir).events, offset)
    said = [event.get("error") for event in events if event.get("kind") == "end"]
    return next((str(error) for error in said if error and error != PEER_LOST), None)
