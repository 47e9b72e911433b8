"""A rank before its first stage: what all stages of its work share."""

from contextlib import ExitStack
from dataclasses import dataclass, field

from toolkit.engines.distributed import Ranks
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import Assignment
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset
from toolkit.run.events import EventLog
from toolkit.train.all_ranks import AllRanks
from toolkit.train.progress import Progress
from toolkit.train.signals import StopRequest
from toolkit.train.split import BatchSplit
from toolkit.train.watchdog import Marks


@dataclass(frozen=True)
class Start:
    """What a rank has when its work starts. Its parts live until the process ends."""

    assignment: Assignment
    ranks: Ranks
    together: AllRanks
    marks: Marks
    stop: StopRequest
    events_before: int
    """See `events_offset`."""
    split: BatchSplit
    progress: Progress = field(default_factory=Progress)
    """Progress of the run, from the checkpoint on that it continues from."""
    at_end: ExitStack = field(default_factory=ExitStack)
    """Closed after the `end` event is written, which W&B reads."""

    @classmethod
    def of(
        cls, assignment: Assignment, ranks: Ranks, together: AllRanks, marks: Marks
    ) -> "Start":
        """The start of this rank's part of an assignment."""
        run, launch = RunDirectory(assignment.run_dir), assignment.recipe.launch
        offset = events_offset(run.path)
        marks.watch(run, ranks.world, launch.hang_timeout_s, offset)
        split = BatchSplit(assignment.plan.layout)
        return cls(assignment, ranks, together, marks, StopRequest(), offset, split)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.assignment.recipe

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self.assignment.plan

    @property
    def directory(self) -> RunDirectory:
        """The run directory."""
        return RunDirectory(self.assignment.run_dir)

    @property
    def events(self) -> EventLog:
        """The run's events.jsonl."""
        return EventLog(self.directory.events)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes the run's own files."""
        return self.ranks.rank == 0
