"""What all parts of a rank's work share."""

from contextlib import ExitStack

from toolkit.engines.distributed import Ranks
from toolkit.run.assignment import Assignment
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.train.all_ranks import AllRanks
from toolkit.train.progress import Progress
from toolkit.train.signals import StopRequest
from toolkit.train.split import BatchSplit
from toolkit.train.watchdog import Marks


class Worker:
    """One rank of a run."""

    def __init__(
        self, assignment: Assignment, ranks: Ranks, together: AllRanks, marks: Marks
    ) -> None:
        self.assignment = assignment
        self.recipe, self.plan = assignment.recipe, assignment.plan
        self.ranks, self.together, self.marks = ranks, together, marks
        self.leads = ranks.rank == 0
        """Whether this is rank 0, which writes the run's own files."""
        self.directory = RunDirectory(assignment.run_dir)
        self.events = EventLog(self.directory.events)
        self.stop = StopRequest()
        self.split = BatchSplit(self.plan.layout)
        self.progress = Progress()
        """Progress of the run, from the checkpoint on that it continues from."""
        self.at_end = ExitStack()
        """Closed after the `end` event is written, which W&B reads."""
        limit_s = self.recipe.launch.hang_timeout_s
        marks.watch(self.directory, ranks.world, limit_s, self.events)
