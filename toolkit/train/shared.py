"""What all parts of a rank's work share: its place, its progress, the split of its batches."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.validation import ValidationHistory
from toolkit.engines.base import StepResult
from toolkit.engines.distributed import Ranks
from toolkit.errors import EXIT_FAILED
from toolkit.layout import Layout
from toolkit.run.assignment import Assignment
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.train.all_ranks import AllRanks
from toolkit.train.loss_guard import HISTORY_STEPS
from toolkit.train.step_reduction import StopRequest
from toolkit.train.watchdog import Marks


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    """Sequences consumed since step 0."""
    recent_losses: tuple[float, ...] = ()
    """Losses of the last steps that were not skipped, for spike detection."""
    consumed_tokens: int | None = 0
    """Unmasked tokens of `consumed_samples`. None if an older checkpoint did not count them."""
    validation: ValidationHistory = field(default_factory=ValidationHistory)
    """State of the validations done, as far as steps to come depend on them."""

    def continue_at(self, saved: Manifest) -> None:
        """Take the progress of a checkpoint."""
        self.step, self.consumed_samples = saved.step, saved.consumed_samples
        self.recent_losses, self.consumed_tokens = saved.recent_losses, saved.consumed_tokens
        self.validation = saved.validation

    def advance(self, result: StepResult, samples: int, tokens: int) -> None:
        """Advance by one step, skipped or not."""
        self.step += 1
        self.consumed_samples += samples
        if self.consumed_tokens is not None:
            self.consumed_tokens += tokens
        if result.skipped is None:
            self.recent_losses = (*self.recent_losses, result.loss)[-HISTORY_STEPS:]


class BatchSplit:
    """How the batches of steps are split over ranks: the plan's layout, until samples move."""

    def __init__(self, layout: Layout) -> None:
        self._steps = (layout, 0, layout)

    @property
    def layout(self) -> Layout:
        """The newest."""
        return self._steps[2]

    def at(self, step: int) -> Layout:
        """Split of the step with this index."""
        before, first, newest = self._steps
        return newest if step >= first else before

    def change(self, layout: Layout, first: int) -> None:
        """Split another way from step `first` on."""
        self._steps = (self.layout, first, layout)

    def resume(self, saved: Layout, unit: int) -> None:
        """Continue with the shares of a checkpoint, if they suit the plan's ranks and batch."""
        planned = self.layout
        suits = saved.dp == planned.dp and saved.global_batch == planned.global_batch
        if suits and unit % saved.round_samples == 0:
            self.change(with_shares(planned, saved.micro_batches), 0)


def with_shares(layout: Layout, shares: tuple[int, ...]) -> Layout:
    """The layout with these samples in the micro batch of each data-parallel rank, and the
    accumulation of the same global batch."""
    return replace(
        layout,
        shares=shares if len({*shares}) > 1 else (),
        micro_batch=max(shares),
        gradient_accumulation=layout.global_batch // sum(shares),
    )


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
        """Closed when `exit_code` is known."""
        self.exit_code = EXIT_FAILED
        limit_s = self.recipe.launch.hang_timeout_s
        marks.watch(self.directory, ranks.world, limit_s, self.events)
