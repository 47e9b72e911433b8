"""What rank 0 reports of a run: metrics.jsonl, events, the progress bar, trackers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.batch import MicroBatch
from toolkit.engines.base import EvalResult, StepResult
from toolkit.recipe.schema import Recipe
from toolkit.run.directory import RunDirectory
from toolkit.run.events import VALIDATION, EventLog
from toolkit.run.metrics import Metrics, MetricsLog
from toolkit.run.progress import ProgressReport
from toolkit.run.trackers import Trackers
from toolkit.train.shared import Progress
from toolkit.train.watchdog import Mark

TRACKER_GRACE_S = 15.0
"""How long the end of a run waits for its trackers. Launchers give a stopping run 30 s."""


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
        self.progress = progress
        self.trackers = Trackers(run, recipe.name, recipe.logging, events)

    def log(self, metrics: Metrics) -> None:
        """Write one logged step to all outputs."""
        self.metrics.write(metrics)
        self.progress.logged(metrics)

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

    def __getitem__(self, index: Any) -> Any:
        self._mark(f"validating, batch {index} of {len(self)}")
        return self._batches[index]
