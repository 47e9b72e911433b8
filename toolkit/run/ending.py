"""Messages and signals about the end of a run, shared by its launcher and its ranks."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import EXIT_FAILED, EXIT_RESUMABLE
from toolkit.run.directory import RunDirectory
from toolkit.run.recorded import read_events

STACKS_SIGNAL = signal.SIGUSR2
"""On this signal, a training rank writes the stacks of all its threads to its log and
continues."""
PEER_LOST = "lost contact with another rank, whose message or log has the reason"
"""A rank's message about a failure that started elsewhere."""


def grace_over(grace_s: float, run_dir: Path, offset: int) -> tuple[str, int]:
    """The message and exit code if ranks are killed after a request to stop.

    `offset`: see `events_offset`. Only what was not saved fails the run.
    """
    step = stopped_at(read_events(RunDirectory(run_dir).events, offset))
    if step is None:
        return f"not saved and gone within launch.grace_s ({grace_s:g} s): killed", EXIT_FAILED
    saved = f"step {step} is saved, but ranks were not gone"
    return f"{saved} within launch.grace_s ({grace_s:g} s): killed", EXIT_RESUMABLE


def stopped_at(events: Sequence[Mapping[str, Any]]) -> int | None:
    """The step that was saved when a run was asked to stop; None if none was."""
    # Written after the save: `signal` by the ranks that were asked, `end` by rank 0.
    saved = (
        e for e in events if e.get("kind") == "signal" or e.get("exit_code") == EXIT_RESUMABLE
    )
    return next((int(event.get("step") or 0) for event in saved), None)


def events_offset(run_dir: Path) -> int:
    """Return the current end of events.jsonl: later events belong to this launch."""
    events = RunDirectory(run_dir).events
    return events.stat().st_size if events.exists() else 0


def cause_of(run_dir: Path, offset: int) -> str | None:
    """The error of the first rank that failed by itself, in events after `offset`."""
    events = read_events(RunDirectory(run_dir).events, offset)
    said = [event.get("error") for event in events if event.get("kind") == "end"]
    return next((str(error) for error in said if error and error != PEER_LOST), None)
