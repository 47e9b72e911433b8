"""A run directory as reports read it: what is there, and whether it runs."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.errors import DataError, DirectoryInUse, DmtError
from toolkit.report.attempts import Event
from toolkit.report.goodput import Goodput, Metrics, goodput
from toolkit.report.summary import Ending, RunState, Summary, summarize
from toolkit.run import jsonl
from toolkit.run.changes import parse_recipe
from toolkit.run.claim import refuse_if_claimed
from toolkit.run.directory import RunDirectory
from toolkit.system.untrusted import parse_mapping, read_bytes
from toolkit.text.units import duration

_TAIL = 1 << 16
"""Bytes at the end of a metrics file that hold its last line."""
_ALIVE_S = 60.0
"""A run counts as ended if it wrote nothing for so long. Used where files have no locks."""
_DEEPEST = 5
"""How deep folders below the given one are searched for runs."""


@dataclass
class RunRecord:
    """What one run directory holds. Mappings are empty where there is no file yet."""

    run: RunDirectory
    events: Sequence[Event] = ()
    metrics: Sequence[Metrics] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def summary(self) -> Summary:
        """What the run has done so far."""
        return _summary(self.run, self.events, self.metrics)

    @cached_property
    def spent(self) -> Goodput:
        """The parts that the run's time went to."""
        return goodput(self.events, self.metrics)

    @cached_property
    def pace(self) -> list[str]:
        """The last message about each straggler, and about the last move of samples."""
        found = {
            (event.get("kind"), event.get("slow_rank")): str(event.get("message", ""))
            for event in self.events
            if event.get("kind") in ("straggler", "balance")
        }
        return [*found.values()]

    def rows(self) -> Iterator[tuple[str, str]]:
        """Labelled lines about the run."""
        yield from self.summary.rows()
        yield from (("pace", sentence) for sentence in self.pace)


def _summary(run: RunDirectory, events: Sequence[Event], metrics: Sequence[Metrics]) -> Summary:
    """The summary. Without a recorded end, a run lives if its lock is held or it wrote
    lately."""
    found = summarize(events, metrics)
    silent_s = time.time() - last_written(run)
    if found.ending.state != "running" or silent_s < _ALIVE_S or _claimed(run):
        return found
    why = f"no end recorded, and silent for {duration(silent_s)}: killed?"
    return replace(found, ending=Ending("failed", why=why))


def read_record(path: Path, *, with_environment: bool = False) -> RunRecord:
    """Read a run directory. Raises DataError for a folder that is none, and for a file that is
    damaged."""
    run = RunDirectory(path)
    if not run.events.exists():
        raise DataError(
            f"{path} is not a run directory with events: it has no {run.events.name}",
            fix="name the folder that `dmt launch` said it writes to (runs/NAME)",
        )
    return RunRecord(
        run,
        events=jsonl.read(run.events),
        metrics=jsonl.read(run.metrics),
        recipe=_mapping(run.recipe, parse_recipe),
        plan=_mapping(run.plan, parse_mapping),
        environment=_mapping(run.environment, parse_mapping) if with_environment else {},
    )


def _mapping(path: Path, parse: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return parse(read_bytes(path).decode("utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} cannot be read: {error}", fix="correct or remove it"
        ) from error


def find_runs(folder: Path) -> list[Path]:
    """Run directories in `folder`, the one written to last first. Raises DataError without any.

    Links are not followed, and a run directory is not searched for others.
    """
    found = sorted(_walk(folder), key=lambda path: -last_written(RunDirectory(path)))
    if not found:
        raise DataError(
            f"no run in {folder}: no folder there has an events.jsonl",
            fix="name the folder that holds the run directories, or the run directory",
        )
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        if "events.jsonl" in files:
            yield Path(path)
        if "events.jsonl" in files or len(Path(path).relative_to(folder).parts) >= _DEEPEST:
            folders.clear()


def last_written(run: RunDirectory) -> float:
    """When the run last gave a sign of life, in seconds since the epoch."""
    signs = (run.events, run.metrics)
    return max((path.stat().st_mtime for path in signs if path.exists()), default=0.0)


def _claimed(run: RunDirectory) -> bool:
    try:
        refuse_if_claimed(run)
    except DirectoryInUse:
        return True
    except (DmtError, OSError):
        return False
    return False


@dataclass(frozen=True)
class RunLine:
    """A run in a list of runs."""

    run: str
    state: RunState
    why: str
    step: int
    loss: float | None
    age_s: float
    """Seconds since the run's last sign of life."""


def run_line(path: Path) -> RunLine:
    """A run in short; of its metrics only the end is read."""
    run = RunDirectory(path)
    size = run.metrics.stat().st_size if run.metrics.exists() else 0
    tail = jsonl.read(run.metrics, max(0, size - _TAIL))
    found = _summary(run, jsonl.read(run.events), tail)
    loss = found.losses and found.losses[1].value
    age_s = max(0.0, time.time() - last_written(run))
    ending = found.ending
    return RunLine(str(path), ending.state, ending.why, found.steps, loss, age_s)
