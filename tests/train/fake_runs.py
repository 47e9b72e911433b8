"""Runs of the loop with the fake engine."""

import math
import signal
from collections.abc import Sequence

from tests.engines.fake import FakeEngine
from toolkit.batch import MicroBatch
from toolkit.data.batches import GlobalBatches
from toolkit.data.order import EpochOrder
from toolkit.data.rows import Samples
from toolkit.engines.base import StepResult
from toolkit.layout import Layout
from toolkit.recipe.batch_sizes import BatchSizes
from toolkit.recipe.schema import GuardSection, OptimizerSection, ScheduleSection
from toolkit.train.loop import Progress, StepReport, TrainingRun, train
from toolkit.train.signals import StopRequest
from toolkit.train.step_reduction import StepReduction

VOCABULARY = 8
STEPS = 40
LAYOUT = Layout(micro_batch=2, gradient_accumulation=2)
SIZES = BatchSizes.of([LAYOUT.global_batch], 16)


class Recorder:
    """Hooks that write down what was called, and can raise a signal at a step."""

    def __init__(self, signal_at: int = -1) -> None:
        self.calls: list[tuple[str, int]] = []
        self.losses: list[float] = []
        self.tokens: list[int] = []
        self.samples: list[int] = []
        self.skipped: dict[int, str] = {}
        self.signal_at = signal_at

    def after_step(self, progress: Progress, report: StepReport) -> None:
        self.calls.append(("step", progress.step))
        self.losses.append(report.result.loss)
        self.tokens.append(report.tokens)
        self.samples += report.samples
        if report.result.skipped is not None:
            self.skipped[progress.step] = report.result.skipped
        if progress.step == self.signal_at:
            signal.raise_signal(signal.SIGTERM)

    def evaluate(self, progress: Progress) -> None:
        self.calls.append(("evaluate", progress.step))

    def save(self, progress: Progress, *, stopping: bool) -> None:
        self.calls.append(("stop" if stopping else "save", progress.step))


def job(
    dataset: Samples,
    engine: FakeEngine,
    steps: int = STEPS,
    guard: GuardSection = GuardSection(),  # noqa: B008 - frozen
) -> TrainingRun:
    return TrainingRun(
        engine=engine,
        batches=GlobalBatches(dataset, EpochOrder(1, len(dataset)), SIZES),
        layout=LAYOUT,
        rank=0,
        seed=1,
        total_steps=steps,
        optimizer=OptimizerSection(learning_rate=5.0),
        schedule=ScheduleSection(name="constant"),
        guard=guard,
        objective=engine.objective,
    )


def run(
    asked: TrainingRun,
    progress: Progress | None = None,
    hooks: Recorder | None = None,
    reduction: type[StepReduction] = StepReduction,
) -> Recorder:
    """Train from `progress`; what the hooks saw."""
    hooks = hooks or Recorder()
    with StopRequest() as stop:
        train(asked, progress or Progress(), hooks, reduction(stop))
    return hooks


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
