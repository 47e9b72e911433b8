"""The work around the steps of a run: logging, validation, checkpoints. Implements Hooks."""

import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
import torch.distributed as dist

from toolkit.batch import MicroBatch
from toolkit.engines.base import Engine, EvalResult, StepResult
from toolkit.recipe.schema import Recipe
from toolkit.run import jsonl
from toolkit.run.comparison import RunMeasurement, event_fields
from toolkit.run.directory import RunDirectory
from toolkit.run.events import VALIDATION, EventLog
from toolkit.text.terminal import lost_output
from toolkit.text.units import GIB
from toolkit.track.metrics import Metrics, MetricsLog, mfu
from toolkit.track.poster import Trackers
from toolkit.track.progress import ProgressReport
from toolkit.track.rank_waits import RankWaits
from toolkit.track.sample_log import SampleLog
from toolkit.train.balance import Balancer
from toolkit.train.checkpoints import RunCheckpoints
from toolkit.train.loop import Progress, StepReport
from toolkit.train.marks import Mark
from toolkit.train.plateau import after_validation
from toolkit.train.replica_check import ReplicaCheck, set_aside_after
from toolkit.train.start import Start

TRACKER_GRACE_S = 15.0
"""How long the end of a run waits for its trackers; launchers give a stopping run 30 s."""


class Reporter:
    """Rank 0's outputs: metrics.jsonl, events, progress bar, trackers."""

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        events: EventLog,
        start: int,
        progress: ProgressReport,
    ) -> None:
        self.events = events
        self.metrics = MetricsLog.resume(run.metrics, start, events)
        for folder in (run.samples, run.ranks):
            jsonl.drop_later_steps_of_ranks(folder, start)
        self.progress = progress
        self._lost: set[str] = set()
        """Outputs that cannot be written any more, as events say."""
        self.trackers = Trackers(run, recipe.name, recipe.logging, events)

    def log(self, metrics: Metrics) -> None:
        """Write one logged step to all outputs."""
        self.metrics.write(metrics)
        self.progress.logged(metrics)
        for lost in set(lost_output()) - self._lost:
            self._lost.add(lost)
            self.events.write("warning", source="output", step=metrics.step, message=lost)
        for problem in self.trackers.problems():
            self.progress.message(problem)

    def skipped(self, step: int, result: StepResult) -> None:
        """Report that a step's update was skipped."""
        self.events.write("skip", step=step, why=result.skipped, loss=result.loss)
        self.progress.message(
            f"step {step}  skipped: {result.skipped} (loss {result.loss:.4f})"
        )

    def warn(self, step: int, problem: str) -> None:
        """Report a limitation of a setting."""
        self.events.write("warning", source="guard", step=step, message=problem)
        self.progress.message(f"warning: {problem}")

    def validated(self, step: int, results: Mapping[str, EvalResult], seconds: float) -> None:
        """Write the validation loss, and that of each of several sources, to all outputs, with
        the time that training waited for it."""
        result = mean_of([*results.values()])
        found = {"step": step, "loss": result.loss, "tokens": result.tokens}
        sources = {}
        said = f"step {step}  validation loss {result.loss:.4f}"
        if len(results) > 1:
            sources = {name: one.loss for name, one in results.items()}
            said += f" ({', '.join(f'{name} {loss:.4f}' for name, loss in sources.items())})"
        fields = {f"{VALIDATION}{name}": loss for name, loss in sources.items()}
        self.events.write(
            "evaluation", **{**result.metrics, **fields, **found}, seconds=round(seconds, 3)
        )
        self.progress.message(said)

    def ended_early(self, progress: Progress) -> None:
        """Report that the validation losses have ended the run."""
        step, history = progress.step, progress.validation
        self.events.write(
            "early_stop",
            step=step,
            message=history.reason,
            best_step=history.best_step,
            best_loss=history.best_loss,
        )
        self.progress.message(f"stopped early at step {step}: {history.reason}")

    def finish(self) -> None:
        """Let all trackers post the remaining values."""
        self.trackers.finish(TRACKER_GRACE_S)


class Observer:
    """The hooks of the loop. Each is a mark."""

    def __init__(
        self,
        start: Start,
        engine: Engine,
        validation: Mapping[str, Callable[[], Sequence[MicroBatch]]],
        checkpoints: RunCheckpoints,
        reporter: Reporter | None,
        steps: int,
        balancer: Balancer | None = None,
    ) -> None:
        """`validation`: this rank's validation batches by the title of their source, with every
        sample split into the given number of parts; `reporter` is None on every rank but 0;
        `steps` are those of the whole run."""
        self.start = start
        self.steps = steps
        self.balancer = balancer
        self.engine = engine
        self.validation = validation
        self.checkpoints = checkpoints
        self.reporter = reporter
        self._window = _Window()
        self._seconds: list[float] = []
        """Times of every step since this start with the planned batch."""
        recipe, ranks = start.recipe, start.ranks
        self._batches = recipe.training.batches
        self._skipping = False
        """Whether the last step was skipped: the weights are those of an earlier step."""
        self._save_due = False
        if ranks.device.type == "cuda":  # building may take longer than training
            torch.cuda.reset_peak_memory_stats(ranks.device)
        layout, directory = start.plan.layout, start.directory
        self._replicas = ReplicaCheck(
            engine, layout, ranks.rank, start.progress.step, self._distrust
        )
        self._waits = RankWaits(directory, ranks.rank)
        self._samples: SampleLog | None = None
        if recipe.logging.samples:
            self._samples = SampleLog(directory, ranks.rank, layout.data_rank(ranks.rank))

    def after_step(self, progress: Progress, report: StepReport) -> None:
        """Advance the bar; log (always the first step) and compare replicas when due."""
        self.start.marks.mark(f"logging step {progress.step}", progress.step)
        size = self._batches.at_step(progress.step - 1)
        self._window.add(report, size * self._batches.sample_tokens)
        if size == self.start.plan.layout.global_batch:
            self._seconds.append(report.seconds)
        self._skipping = report.result.skipped is not None
        if self._samples is not None:
            self._samples.write(progress.step, report.samples)
        if self.reporter is not None:
            self.reporter.progress.advance(progress.step)
            if report.result.skipped is not None:
                self.reporter.skipped(progress.step, report.result)
        every = self.start.recipe.logging.every_steps
        if progress.step % every == 0 or progress.step == 1:
            metrics = self._metrics(progress, report)
            window = self._window
            self._waits.write(progress.step, window.steps, window.data_wait_s)
            self._window = _Window()
            if self.reporter is not None:
                self.reporter.log(metrics)
        self._compare_replicas(progress.step)

    def _compare_replicas(self, step: int) -> None:
        """Compare when due. Raises RunFailed when replicas differ."""
        every = self.start.recipe.guard.replica_check_every_steps
        if every is None or step % every != 0:
            return
        problem = self._replicas.check(step)
        if problem is not None and self.reporter is not None:
            self.reporter.warn(step, problem)

    def _distrust(self, agreed_step: int) -> str:
        """Set later checkpoints aside, also one that is still being written. Collective."""
        self.checkpoints.tell(wait=True)
        if self.reporter is None:
            return ""
        return set_aside_after(self.checkpoints.store.folder, agreed_step)

    def _metrics(self, progress: Progress, report: StepReport) -> Metrics:
        plan, result = self.start.plan, report.result
        step_time_s = self._window.seconds / self._window.steps
        tokens_per_s = self._window.tokens / self._window.seconds
        return Metrics(
            step=progress.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=report.learning_rate,
            tokens=report.tokens,
            tokens_per_s=tokens_per_s,
            step_time_s=step_time_s,
            data_wait_s=self._window.data_wait_s / self._window.steps,
            mfu=mfu(
                plan.flops_per_token,
                tokens_per_s,
                plan.peak_flops_per_gpu,
                plan.layout.world,
            ),
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            skipped=result.skipped is not None,
            memory_gib=peak_memory_gib(self.start.ranks.device),
            metrics=result.metrics,
        )

    def evaluate(self, progress: Progress) -> None:
        """Validate when due."""
        self.validate(progress)
        self.start.marks.mark(f"step {progress.step + 1}", progress.step)

    def validate(self, progress: Progress) -> None:
        """Validate when due: during training and, where the run depends on it, at the last
        step. A run that continues does what a signal kept it from."""
        recipe, step = self.start.recipe, progress.step
        self.start.marks.mark(f"validating at step {step}", step)
        every = recipe.evaluation.every_steps
        last = step == self.steps and recipe.follows_validation
        if last or (every and step % every == 0):
            self.evaluate_now(progress)

    def evaluate_now(self, progress: Progress) -> None:
        """Validate, unless that was done at this step already."""
        if not self.validation or progress.validation.step == progress.step:
            return
        started = time.perf_counter()
        results = {}
        for name, batches in self.validation.items():
            self.start.marks.begin("building the validation batches")
            watched = MarkedBatches(batches(), self.start.marks.begin)
            results[name] = self.engine.evaluate(watched)
        loss = mean_of([*results.values()]).loss
        if self.start.recipe.follows_validation:
            # Groups of ranks may sum in another order, and one would end the run alone.
            loss = self.start.together.rank_zero(lambda: loss)
        self._remember(progress, loss)
        if self.reporter is not None:
            self.reporter.validated(progress.step, results, time.perf_counter() - started)

    def _remember(self, progress: Progress, loss: float) -> None:
        """Let later steps depend on a validation loss. A plateau is looked for behind the
        warm-up."""
        recipe, step = self.start.recipe, progress.step
        stopping, schedule = recipe.evaluation.early_stopping, recipe.schedule
        threshold = stopping.threshold if stopping is not None else 0.0
        history = progress.validation.after(step, loss, threshold)
        if schedule.name == "plateau" and step >= schedule.warmup(self.steps):
            peak = recipe.optimizer.learning_rate
            state = after_validation(history.plateau, loss, peak, schedule)
            history = replace(history, plateau=state)
        progress.validation = history

    def save(self, progress: Progress, *, stopping: bool) -> None:
        """Start saving when due; when stopping, wait for it.

        A save that is due while steps are skipped is postponed to the next update: saves
        without new weights would evict good checkpoints, and reset the restart count of a run
        that is stuck. Where the run depends on a validation that is due, that comes first, so
        that the checkpoint has it; not when stopping, which has little time.
        """
        if self.start.recipe.follows_validation and not stopping:
            self.validate(progress)
        self.start.marks.mark(f"saving step {progress.step}", progress.step)
        self.checkpoints.tell()
        every = self.start.recipe.checkpoint.every_steps
        self._save_due |= bool(every and progress.step % every == 0)
        if stopping or (self._save_due and not self._skipping):
            self._save_due = False
            if not stopping:
                self._balance(progress.step)
            self.checkpoints.save(self.engine, progress, self.start.marks.begin)
        if stopping:
            self._finish_saving()
            self.compare(progress)

    def _balance(self, step: int) -> None:
        """Measure ranks, and let a checkpoint record how later batches are split."""
        if self.balancer is None or step >= self.steps:
            return
        for line in self.balancer.at_checkpoint(step):
            if self.reporter is not None:
                self.reporter.progress.message(f"step {step}  {line}")
        self.checkpoints.layout = self.start.split.layout

    def save_now(self, progress: Progress) -> None:
        """Save, unless this step is already saved, and wait for it."""
        self.checkpoints.save(self.engine, progress, self.start.marks.begin)
        self._finish_saving()

    def _finish_saving(self) -> None:
        self.start.marks.begin("waiting until the last save is written")
        self.checkpoints.finish()

    def compare(self, progress: Progress) -> None:
        """Write the plan's prediction next to what was measured. Collective."""
        prediction = self.start.assignment.prediction
        if prediction is None or not self._seconds:
            return  # resumed at the end: there was nothing left to train
        device, counted = self.start.ranks.device, self._seconds[1:] or self._seconds
        measured = RunMeasurement(
            step_time_s=statistics.median(counted),
            steps=len(counted),
            memory_gib=peak_memory_gib(device),
            process_gib=peak_process_gib(device),
            **beyond_allocated(device),
        )
        if self.reporter is not None:
            fields = event_fields(prediction, measured)
            self.reporter.events.write("prediction", step=progress.step, **fields)


def mean_of(results: Sequence[EvalResult]) -> EvalResult:
    """The combined results of several sources, weighted by tokens."""
    if len(results) == 1:
        return results[0]
    tokens = sum(result.tokens for result in results)

    def mean(values: Sequence[float]) -> float:
        weighted = sum(v * one.tokens for v, one in zip(values, results, strict=True))
        return weighted / tokens if tokens else math.nan

    names = results[0].metrics
    metrics = {name: mean([one.metrics[name] for one in results]) for name in names}
    return EvalResult(mean([one.loss for one in results]), tokens, metrics)


class MarkedBatches(Sequence[MicroBatch]):
    """Batches that report progress when they are taken, so that a long validation does not
    count as a hang."""

    def __init__(self, batches: Sequence[MicroBatch], mark: Mark) -> None:
        self._batches = batches
        self._mark = mark

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | Sequence[MicroBatch]:
        self._mark(f"validating, batch {index} of {len(self)}")
        return self._batches[index]


class _Window:
    """Steps since the last logged one."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.data_wait_s = 0.0
        self.tokens = 0

    def add(self, report: StepReport, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.seconds += report.seconds
        self.data_wait_s += report.data_wait_s


def peak_memory_gib(device: torch.device) -> float | None:
    """Peak allocated device memory of the fullest rank, in GiB; None on CPU. Collective."""
    if device.type != "cuda":
        return None
    return _most(device, torch.cuda.max_memory_allocated(device) / GIB)[0]


def beyond_allocated(device: torch.device) -> dict[str, Any]:
    """Fields of `RunMeasurement`: what the allocator reserved and what is outside of it, GiB of
    the fullest rank, and its retries, the most of a rank. None on CPU. Collective."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.max_memory_reserved(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
    reserved_gib, outside_gib, times = _most(device, reserved / GIB, outside / GIB, retries)
    return {"reserved_gib": reserved_gib, "outside_gib": outside_gib, "retries": int(times)}


def peak_process_gib(device: torch.device) -> float | None:
    """Peak resident memory of the largest process, in GiB; None on a GPU. Collective."""
    if device.type != "cpu":
        return None
    return _most(device, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB)[0]


def _most(device: torch.device, *values: float) -> list[float]:
    """The largest of each value on any rank. Collective."""
    most = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()
