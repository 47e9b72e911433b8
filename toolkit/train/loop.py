"""The training loop: what happens in a run, in order, on one screen."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from toolkit.batch import MicroBatch
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.validation import ValidationHistory
from toolkit.data.batches import GlobalBatches
from toolkit.engines.base import Engine, StepResult
from toolkit.errors import Stopped
from toolkit.layout import Layout
from toolkit.objectives.base import Objective, check_batch
from toolkit.recipe.schema import (
    EarlyStoppingSection,
    GuardSection,
    OptimizerSection,
    ScheduleSection,
)
from toolkit.system.failpoints import failpoint
from toolkit.train.dropout_seed import seed_dropout
from toolkit.train.guard import HISTORY_STEPS, StepGuard
from toolkit.train.prefetch import Prefetch
from toolkit.train.schedule import learning_rate
from toolkit.train.split import BatchSplit
from toolkit.train.step_reduction import StepReduction


@dataclass
class Progress:
    """The progress of a run: everything needed to resume it."""

    step: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    """Sequences consumed since step 0."""
    recent_losses: tuple[float, ...] = ()
    """Losses of the last steps that were not skipped, for spike detection."""
    consumed_tokens: int | None = 0
    """Unmasked tokens of `consumed_samples`; None if an older checkpoint did not count them."""
    validation: ValidationHistory = field(default_factory=ValidationHistory)
    """Of the validations done, as far as steps to come depend on them."""

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


@dataclass(frozen=True)
class StepReport:
    """What one step did and how long it took."""

    result: StepResult
    learning_rate: float
    tokens: int
    """Unmasked tokens of the global batch."""
    seconds: float
    """Time since the end of the previous step, including its logging, without saving and
    validation."""
    data_wait_s: float = 0.0
    """The part of `seconds` in which this rank waited for micro batches."""
    samples: tuple[int, ...] = ()
    """Indices of this rank's samples in the training data."""


class Hooks(Protocol):
    """The work around training steps; each hook decides itself whether it is due."""

    def after_step(self, progress: Progress, report: StepReport) -> None:
        """Log, and look for faults."""

    def save(self, progress: Progress, *, stopping: bool) -> None:
        """Write a checkpoint, when due or when stopping."""

    def evaluate(self, progress: Progress) -> None:
        """Validate, when due."""


@dataclass(frozen=True)
class TrainingRun:
    """The loop's inputs."""

    engine: Engine
    batches: GlobalBatches
    layout: Layout
    rank: int
    seed: int
    total_steps: int
    optimizer: OptimizerSection
    schedule: ScheduleSection
    guard: GuardSection
    objective: Objective
    early_stopping: EarlyStoppingSection | None = None
    split: BatchSplit | None = None
    """If samples may move between ranks; None: `layout` is that of every step."""

    def ends_at(self, progress: Progress) -> bool:
        """Whether all steps are done, or the validation losses end the run early."""
        done = progress.step >= self.total_steps
        return done or progress.validation.ends_run(self.early_stopping)

    def micro_batches(self, step: int, consumed_samples: int) -> list[MicroBatch]:
        """This rank's part of the global batch of `step`; empty after the last step."""
        if step >= self.total_steps:
            return []
        layout = self.layout if self.split is None else self.split.at(step)
        return self.batches.micro_batches(
            consumed_samples, layout.data_rank(self.rank), layout.micro_batches
        )

    def counts(self, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Unmasked tokens of this rank's micro batches, and the objective's count."""
        counted = sum(float(self.objective.count(batch)) for batch in batches)
        return sum(batch.tokens for batch in batches), counted


def train(job: TrainingRun, progress: Progress, hooks: Hooks, reduction: StepReduction) -> None:
    """Train from `progress` to the last step, or to the validation that stops the run early.

    Raises Stopped after a signal to any rank, after saving; RunFailed if too many steps in a
    row were skipped or a hook finds a fault, without saving.
    """
    first_step, first_sample = progress.step, progress.consumed_samples

    sizes = job.batches.sizes

    def micro_batches(step: int) -> list[MicroBatch]:
        done = sizes.samples(step) - sizes.samples(first_step)
        return job.micro_batches(step, first_sample + done)

    with Prefetch(micro_batches, first_step) as prefetch:
        _train(job, progress, hooks, reduction, prefetch)


def _train(
    job: TrainingRun,
    progress: Progress,
    hooks: Hooks,
    reduction: StepReduction,
    prefetch: Prefetch,
) -> None:
    layout, guard = job.layout, StepGuard(job.guard)
    replicas = layout.world // layout.dp  # ranks that count the same batches
    coming, _ = prefetch.take()
    for batch in coming[:1]:
        check_batch(job.objective, batch)
    reduction.begin(*job.counts(coming))
    _, counted = reduction.finish()
    started = time.perf_counter()
    while not job.ends_at(progress):
        rate = learning_rate(
            progress.step,
            job.total_steps,
            job.optimizer.learning_rate,
            job.schedule,
            progress.validation.plateau,
        )
        micro_batches, (tokens, count) = coming, (sum_ / replicas for sum_ in counted)
        coming, data_wait_s = prefetch.take()
        # The one reduction of the loop: it runs while the step does.
        reduction.begin(*job.counts(coming))
        seed_dropout(job.seed, progress.step, layout.token_rank(job.rank))
        failpoint("step")
        max_loss = guard.max_loss(progress.recent_losses)
        result = job.engine.train_step(micro_batches, count, rate, max_loss)
        progress.advance(result, job.batches.sizes.at_step(progress.step), int(tokens))

        samples = tuple(sample for batch in micro_batches for sample in batch.samples)
        done = time.perf_counter()
        seconds, started = done - started, done
        report = StepReport(result, rate, int(tokens), seconds, data_wait_s, samples)
        hooks.after_step(progress, report)
        guard.check(progress.step, result)
        requested, counted = reduction.finish()
        stopping = requested and progress.step < job.total_steps
        between = time.perf_counter()
        hooks.save(progress, stopping=stopping)  # before a validation, which takes time
        if stopping:
            raise Stopped(
                f"stopped by a signal after saving step {progress.step} of {job.total_steps}",
                fix="start the same command again to resume",
            )
        hooks.evaluate(progress)
        started += time.perf_counter() - between
