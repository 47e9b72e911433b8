"""A run's steps, in order: train, log, save, validate."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch

from toolkit.batch import MicroBatch
from toolkit.data.batches import GlobalBatches
from toolkit.engines.base import Engine, StepResult
from toolkit.errors import RunFailed, Stopped
from toolkit.objectives.base import check_batch
from toolkit.run.comparison import RunMeasurement, event_fields
from toolkit.run.metrics import Metrics, mfu
from toolkit.system.failpoints import failpoint
from toolkit.train.all_ranks import PeerFailed
from toolkit.train.balance import Balancer
from toolkit.train.checkpoints import RunCheckpoints
from toolkit.train.gpu_memory import allocated_gib, peaks
from toolkit.train.loss_guard import StepGuard
from toolkit.train.prefetch import Prefetch
from toolkit.train.replica_check import ReplicaCheck, set_aside_after
from toolkit.train.reporter import MarkedBatches, Reporter, mean_of
from toolkit.train.schedule import after_validation, learning_rate
from toolkit.train.shared import Worker
from toolkit.train.step_reduction import StepReduction


@dataclass(frozen=True)
class StepReport:
    """What one step did and how long it took."""

    result: StepResult
    learning_rate: float
    tokens: int
    """Unmasked tokens of the global batch."""
    sequences: int
    """Sequences of the global batch."""
    seconds: float
    """Time since the end of the previous step, including its logging, without saving and
    validation."""
    data_wait_s: float = 0.0
    """The part of `seconds` in which this rank waited for micro batches."""


class TrainingRun:
    """The steps of one rank, from the progress of its start to the last one."""

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        batches: GlobalBatches,
        seed: int,
        validation: Mapping[str, Callable[[], Sequence[MicroBatch]]],
        checkpoints: RunCheckpoints,
        reporter: Reporter | None,
        steps: int,
        balancer: Balancer | None = None,
    ) -> None:
        """`validation`: this rank's validation batches by the title of their source. `reporter`
        is None on every rank but 0. `steps` are those of the whole run."""
        self.worker, self.engine, self.batches, self.seed = worker, engine, batches, seed
        self.validation, self.checkpoints = validation, checkpoints
        self.reporter, self.steps, self.balancer = reporter, steps, balancer
        self.progress, self.recipe, self.marks = worker.progress, worker.recipe, worker.marks
        self._objective, self._layout = worker.recipe.objective(), worker.plan.layout
        self._unlogged: list[StepReport] = []
        """Steps since the last logged one."""
        self._seconds: list[float] = []
        """Times of every step since this start with the planned batch."""
        self._skipping = False
        """Whether the last step was skipped: the weights are those of an earlier step."""
        self._save_due = False
        if worker.ranks.device.type == "cuda":  # building may take longer than training
            torch.cuda.reset_peak_memory_stats(worker.ranks.device)
        self._replicas = ReplicaCheck(engine, self._layout, self.progress.step, self._distrust)

    def to_the_end(self, reduction: StepReduction) -> None:
        """Run the remaining steps, save, validate, and compare with the plan. Raises as `train`
        does."""
        progress, reporter = self.progress, self.reporter
        with reporter.progress if reporter is not None else nullcontext():
            try:
                if self.recipe.follows_validation and progress.step:
                    self._make_up_validation()
                self.marks.begin(f"step {progress.step + 1}", step=progress.step)
                self.train(reduction)
            except (RunFailed, PeerFailed, Stopped):
                # Raised on every rank: the save in flight is good.
                self.checkpoints.tell(wait=True)
                raise
            # A signal from here on has no effect: the rest is short. Saving comes first, so
            # that a kill loses no step.
            self.checkpoints.save(self.engine, progress, self.marks.begin)
            self._finish_saving()
            self._evaluate_now()
            self.compare()
            if progress.step < self.steps and reporter is not None:
                reporter.ended_early(progress)

    def train(self, reduction: StepReduction) -> None:
        """Train to the last step, or to the validation that stops the run early.

        Raises Stopped after a signal to any rank, after saving; RunFailed if too many steps in
        a row were skipped or replicas differ, without saving.
        """
        first_step, first_sample = self.progress.step, self.progress.consumed_samples
        sizes = self.batches.sizes

        def micro_batches(step: int) -> list[MicroBatch]:
            done = sizes.samples(step) - sizes.samples(first_step)
            return self._micro_batches(step, first_sample + done)

        with Prefetch(micro_batches, first_step) as prefetch:
            self._train(reduction, prefetch)

    def _train(self, reduction: StepReduction, prefetch: Prefetch) -> None:
        progress, layout, guard = self.progress, self._layout, StepGuard(self.recipe.guard)
        replicas = layout.world // layout.dp  # ranks that count the same batches
        coming, _ = prefetch.take()
        for batch in coming[:1]:
            check_batch(self._objective, batch)
        reduction.begin(*self._counts(coming))
        _, counted = reduction.finish()
        started = time.perf_counter()
        while not self._ends():
            peak, schedule = self.recipe.optimizer.learning_rate, self.recipe.schedule
            plateau = progress.validation.plateau
            rate = learning_rate(progress.step, self.steps, peak, schedule, plateau)
            micro_batches, (tokens, count) = coming, (sum_ / replicas for sum_ in counted)
            coming, data_wait_s = prefetch.take()
            # The one reduction of the loop: it runs while the step does.
            reduction.begin(*self._counts(coming))
            seed_dropout(self.seed, progress.step, layout.token_rank(self.worker.ranks.rank))
            failpoint("step")
            max_loss = guard.max_loss(progress.recent_losses)
            result = self.engine.train_step(micro_batches, count, rate, max_loss)
            size = self.batches.sizes.at_step(progress.step)
            progress.advance(result, size, int(tokens))

            done = time.perf_counter()
            seconds, started = done - started, done
            step = StepReport(result, rate, int(tokens), size, seconds, data_wait_s)
            self.log(step)
            guard.check(progress.step, result)
            requested, counted = reduction.finish()
            stopping = requested and progress.step < self.steps
            between = time.perf_counter()
            self.save(stopping=stopping)  # before a validation, which takes time
            if stopping:
                raise Stopped(
                    f"stopped by a signal after saving step {progress.step} of {self.steps}",
                    fix="start the same command again to resume",
                )
            self.evaluate()
            self.marks.begin(f"step {progress.step + 1}", step=progress.step)
            started += time.perf_counter() - between

    def _ends(self) -> bool:
        """Whether all steps are done, or the validation losses end the run early."""
        ends = self.progress.validation.ends_run(self.recipe.evaluation.patience)
        return self.progress.step >= self.steps or ends

    def _micro_batches(self, step: int, consumed_samples: int) -> list[MicroBatch]:
        """This rank's part of the global batch of `step`. Empty after the last step."""
        if step >= self.steps:
            return []
        layout, rank = self.worker.split.at(step), self.worker.ranks.rank
        return self.batches.micro_batches(
            consumed_samples, layout.data_rank(rank), layout.micro_batches
        )

    def _counts(self, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Unmasked tokens of this rank's micro batches, and the objective's count."""
        counted = sum(float(self._objective.count(batch)) for batch in batches)
        return sum(batch.tokens for batch in batches), counted

    def log(self, report: StepReport) -> None:
        """Advance the bar. Log (always the first and the last step) and compare replicas when
        due. Raises RunFailed when replicas differ."""
        step, reporter = self.progress.step, self.reporter
        self.marks.begin(f"logging step {step}", step=step)
        self._unlogged.append(report)
        if report.sequences == self._layout.global_batch:
            self._seconds.append(report.seconds)
        self._skipping = report.result.skipped is not None
        if reporter is not None:
            reporter.progress.advance(step)
            if self._skipping:
                reporter.skipped(step, report.result)
        if step % self.recipe.logging.every_steps == 0 or step in (1, self.steps):
            metrics = self._metrics(self._unlogged)
            self._unlogged = []
            if reporter is not None:
                reporter.log(metrics)
        every = self.recipe.guard.replica_check_every_steps
        if every is not None and step % every == 0:
            problem = self._replicas.check(step)
            if problem is not None and reporter is not None:
                reporter.warn(step, problem)

    def _distrust(self, agreed_step: int) -> str:
        """Set later checkpoints aside, also one that is still being written. Collective."""
        self.checkpoints.tell(wait=True)
        if self.reporter is None:
            return ""
        return set_aside_after(self.checkpoints.store.folder, agreed_step)

    def _metrics(self, steps: Sequence[StepReport]) -> Metrics:
        """The line of the last of these steps. Collective."""
        plan, last, result = self.worker.plan, steps[-1], steps[-1].result
        seconds = sum(one.seconds for one in steps)
        sequences = sum(one.sequences for one in steps)
        tokens_per_s = sequences * self.recipe.training.batches.sample_tokens / seconds
        peak_flops, world = plan.peak_flops_per_gpu, plan.layout.world
        return Metrics(
            step=self.progress.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=last.learning_rate,
            tokens=last.tokens,
            tokens_per_s=tokens_per_s,
            step_time_s=seconds / len(steps),
            data_wait_s=sum(one.data_wait_s for one in steps) / len(steps),
            mfu=mfu(plan.flops_per_token, tokens_per_s, peak_flops, world),
            consumed_samples=self.progress.consumed_samples,
            consumed_tokens=self.progress.consumed_tokens,
            skipped=result.skipped is not None,
            memory_gib=allocated_gib(self.worker.ranks.device),
            metrics=result.metrics,
        )

    def save(self, *, stopping: bool) -> None:
        """Start saving when due. When stopping, wait for it.

        A save that is due while steps are skipped is postponed to the next update: saves
        without new weights would evict good checkpoints, and reset the restart count of a run
        that is stuck. Where the run depends on a validation that is due, that comes first, so
        that the checkpoint has it; not when stopping, which has little time.
        """
        progress = self.progress
        if self.recipe.follows_validation and not stopping:
            self.evaluate()
        self.marks.begin(f"saving step {progress.step}", step=progress.step)
        self.checkpoints.tell()
        every = self.recipe.checkpoint.every_steps
        self._save_due |= bool(every and progress.step % every == 0)
        if stopping or (self._save_due and not self._skipping):
            self._save_due = False
            if not stopping:
                self._balance(progress.step)
            self.checkpoints.save(self.engine, progress, self.marks.begin)
        if stopping:
            self._finish_saving()
            self.compare()

    def _balance(self, step: int) -> None:
        """Measure ranks, and let a checkpoint record how later batches are split."""
        if self.balancer is None or step >= self.steps:
            return
        for line in self.balancer.at_checkpoint(step):
            if self.reporter is not None:
                self.reporter.progress.message(f"step {step}  {line}")
        self.checkpoints.layout = self.worker.split.layout

    def _finish_saving(self) -> None:
        self.marks.begin("waiting until the last save is written")
        self.checkpoints.finish()

    def evaluate(self) -> None:
        """Validate when due: during training and, where the run depends on it, at the last
        step. A run that continues does what a signal kept it from."""
        step, every = self.progress.step, self.recipe.evaluation.every_steps
        self.marks.begin(f"validating at step {step}", step=step)
        last = step == self.steps and self.recipe.follows_validation
        if last or (every and step % every == 0):
            self._evaluate_now()

    def _evaluate_now(self) -> None:
        """Validate, unless that was done at this step already."""
        progress, begin = self.progress, self.marks.begin
        if not self.validation or progress.validation.step == progress.step:
            return
        started = time.perf_counter()
        results = {}
        for name, batches in self.validation.items():
            begin("building the validation batches")
            results[name] = self.engine.evaluate(MarkedBatches(batches(), begin))
        loss = mean_of([*results.values()]).loss
        if self.recipe.follows_validation:
            # Groups of ranks may sum in another order, and one would end the run alone.
            loss = self.worker.together.rank_zero(lambda: loss)
        self._remember(loss)
        if self.reporter is not None:
            self.reporter.validated(progress.step, results, time.perf_counter() - started)

    def _remember(self, loss: float) -> None:
        """Let later steps depend on a validation loss. A plateau is looked for behind the
        warm-up."""
        progress, schedule = self.progress, self.recipe.schedule
        history = progress.validation.after(progress.step, loss)
        if schedule.name == "plateau" and progress.step >= schedule.warmup(self.steps):
            peak = self.recipe.optimizer.learning_rate
            state = after_validation(history.plateau, loss, peak, schedule)
            history = replace(history, plateau=state)
        progress.validation = history

    def _make_up_validation(self) -> None:
        """Do the validation that a stop left out, and complete the checkpoint of that step."""
        before = self.progress.validation
        self.evaluate()
        if self.progress.validation != before and self.worker.leads:
            self.checkpoints.add_validation(self.progress)

    def compare(self) -> None:
        """Write the plan's prediction next to what was measured. Collective."""
        if not self._seconds:
            return  # resumed at the end: there was nothing left to train
        counted = self._seconds[1:] or self._seconds
        measured = RunMeasurement(
            step_time_s=statistics.median(counted),
            steps=len(counted),
            **peaks(self.worker.ranks.device),
        )
        if self.reporter is not None:
            fields = event_fields(self.worker.assignment.prediction, measured)
            self.reporter.events.write("prediction", step=self.progress.step, **fields)


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seed dropout on one rank (`Layout.token_rank`) in one step: a resumed run draws what it
    would have drawn.

    As `torch.manual_seed`, which formats a stack trace each time CUDA is not in use.
    """
    digest = blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
