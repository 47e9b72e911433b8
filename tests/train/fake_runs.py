"""Runs of the loop with the fake engine."""

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.fake import FakeEngine
from toolkit.batch import MicroBatch
from toolkit.data.batches import GlobalBatches
from toolkit.data.order import EpochOrder
from toolkit.data.rows import Samples
from toolkit.engines.base import StepResult
from toolkit.layout import Layout
from toolkit.recipe.batch_sizes import BatchSizes
from toolkit.recipe.schema import (
    EvaluationSection,
    GuardSection,
    OptimizerSection,
    ScheduleSection,
)
from toolkit.run.directory import RunDirectory
from toolkit.train.loop import StepReport, TrainingRun
from toolkit.train.shared import BatchSplit, Progress
from toolkit.train.step_reduction import StepReduction, StopRequest

VOCABULARY = 8
STEPS = 40
LAYOUT = Layout(micro_batch=2, gradient_accumulation=2)
SIZES = BatchSizes.of([LAYOUT.global_batch], 16)


class Recorder:
    """What a run called, and a signal that it gets at a step."""

    def __init__(self, signal_at: int = -1) -> None:
        self.calls: list[tuple[str, int]] = []
        self.reports: list[StepReport] = []
        self.skipped: dict[int, str] = {}
        self.signal_at = signal_at

    @property
    def losses(self) -> list[float]:
        return [report.result.loss for report in self.reports]

    @property
    def tokens(self) -> list[int]:
        return [report.tokens for report in self.reports]


class RecordedRun(TrainingRun):
    """Steps of which a recorder writes down what comes between them, instead of doing it."""

    recorder: Recorder

    def log(self, report: StepReport) -> None:
        step = self.progress.step
        self.recorder.calls.append(("step", step))
        self.recorder.reports.append(report)
        if report.result.skipped is not None:
            self.recorder.skipped[step] = report.result.skipped
        if step == self.recorder.signal_at:
            signal.raise_signal(signal.SIGTERM)

    def evaluate(self) -> None:
        self.recorder.calls.append(("evaluate", self.progress.step))

    def save(self, *, stopping: bool) -> None:
        self.recorder.calls.append(("stop" if stopping else "save", self.progress.step))


@dataclass(frozen=True)
class FakeJob:
    """A run's settings."""

    engine: FakeEngine
    batches: GlobalBatches
    layout: Layout
    steps: int
    guard: GuardSection


def job(
    dataset: Samples,
    engine: FakeEngine,
    steps: int = STEPS,
    guard: GuardSection = GuardSection(),  # noqa: B008 - frozen
) -> FakeJob:
    batches = GlobalBatches(dataset, EpochOrder(1, len(dataset)), SIZES)
    return FakeJob(engine, batches, LAYOUT, steps, guard)


def fake_start(layout: Layout, progress: Progress, **recipe: Any) -> Any:
    """The start of rank 0 on a CPU."""
    settings = {
        "logging": SimpleNamespace(every_steps=100),
        "guard": SimpleNamespace(replica_check_every_steps=None),
        "evaluation": EvaluationSection(),
        "schedule": ScheduleSection(name="constant"),
        "optimizer": OptimizerSection(learning_rate=5.0),
        "objective": lambda: None,
    }
    return SimpleNamespace(
        recipe=SimpleNamespace(**settings | recipe),
        plan=SimpleNamespace(layout=layout, flops_per_token=1.0),
        ranks=SimpleNamespace(rank=0, device=torch.device("cpu")),
        marks=SimpleNamespace(begin=lambda *_, **__: None),
        progress=progress,
        split=BatchSplit(layout),
        together=SimpleNamespace(rank_zero=lambda action: action()),
    )


def run(
    asked: FakeJob,
    progress: Progress | None = None,
    recorder: Recorder | None = None,
    reduction: type[StepReduction] = StepReduction,
    rank: int = 0,
) -> Recorder:
    """Train from `progress`; what was recorded."""
    start = fake_start(
        asked.layout, progress or Progress(), guard=asked.guard,
        objective=lambda: asked.engine.objective,
    )  # fmt: skip
    start.ranks.rank = rank
    with TemporaryDirectory() as folder, StopRequest() as stop:
        start.directory = RunDirectory(Path(folder))
        nothing: Any = None
        engine: Any = asked.engine
        made = RecordedRun(start, engine, asked.batches, 1, {}, nothing, None, asked.steps)
        made.recorder = recorder or Recorder()
        made.train(reduction(stop))
    return made.recorder


class SpoiledEngine(FakeEngine):
    """Computes the loss of some steps with other weights: `spoiled` says what is added."""

    def __init__(self, spoiled: dict[int, float]) -> None:
        super().__init__(VOCABULARY)
        self.spoiled = spoiled

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        count: float,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        kept = self.logits
        added = self.spoiled.get(len(self.learning_rates), 0.0)
        self.logits = kept.clone()
        self.logits[-1] += added
        result = super().train_step(micro_batches, count, learning_rate, max_loss)
        if result.skipped is not None:
            self.logits = kept
        return result
