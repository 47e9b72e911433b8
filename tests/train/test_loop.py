"""The loop, with the fake engine: order of events, resuming, stopping."""

import math
import signal
from pathlib import Path

import numpy as np
import pytest

from toolkit.data.batches import GlobalBatches
from toolkit.data.indexed import IndexedWriter, read_indexed
from toolkit.data.packing import PackedDataset, TokenStream
from toolkit.data.tokenized import TokenizedData
from toolkit.engines.fake import FakeEngine
from toolkit.errors import Stopped
from toolkit.plan.layout import Layout
from toolkit.recipe.schema import GuardSection, OptimizerSection, ScheduleSection
from toolkit.train.loop import Job, Progress, StepReport, train
from toolkit.train.signals import StopRequest

VOCABULARY = 8
STEPS = 40
LAYOUT = Layout(micro_batch=2, gradient_accumulation=2)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    tokens = np.random.default_rng(0).choice(VOCABULARY, 2000, p=[0.5, 0.2, *[0.05] * 6])
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.append(tokens)
        writer.end_document()
        writer.commit()
    data = TokenizedData(read_indexed(prefix), "fingerprint", "test")
    return PackedDataset(TokenStream.whole(data), 16, VOCABULARY)


class Recorder:
    """Hooks that write down what was called, and can raise a signal at a step."""

    def __init__(self, signal_at: int = -1) -> None:
        self.calls: list[tuple[str, int]] = []
        self.losses: list[float] = []
        self.signal_at = signal_at

    def after_step(self, progress: Progress, report: StepReport) -> None:
        self.calls.append(("step", progress.step))
        self.losses.append(report.result.loss)
        if progress.step == self.signal_at:
            signal.raise_signal(signal.SIGTERM)

    def evaluate(self, progress: Progress) -> None:
        self.calls.append(("evaluate", progress.step))

    def save(self, progress: Progress, *, stopping: bool) -> None:
        self.calls.append(("stop" if stopping else "save", progress.step))


def job(
    dataset: PackedDataset,
    engine: FakeEngine,
    steps: int = STEPS,
    guard: GuardSection = GuardSection(),  # noqa: B008 - frozen
) -> Job:
    return Job(
        engine=engine,
        batches=GlobalBatches(dataset, seed=1, global_batch_size=LAYOUT.global_batch),
        layout=LAYOUT,
        dp_rank=0,
        seed=1,
        total_steps=steps,
        optimizer=OptimizerSection(learning_rate=5.0),
        schedule=ScheduleSection(name="constant"),
        guard=guard,
    )


def test_loss_falls_to_the_unigram_entropy(dataset: PackedDataset) -> None:
    hooks = Recorder()
    with StopRequest() as stop:
        train(job(dataset, FakeEngine(VOCABULARY)), Progress(), hooks, stop)
    assert hooks.losses[0] == pytest.approx(math.log(VOCABULARY), rel=1e-6)
    assert np.mean(hooks.losses[-10:]) == pytest.approx(
        dataset.unigram_entropy_nats(), rel=0.05
    )
    assert hooks.calls[:3] == [("step", 1), ("save", 1), ("evaluate", 1)]
    assert hooks.calls[-1] == ("evaluate", STEPS)


def test_resumed_run_is_the_uninterrupted_one(dataset: PackedDataset, tmp_path: Path) -> None:
    whole, first, second = Recorder(), Recorder(), Recorder()
    with StopRequest() as stop:
        train(job(dataset, FakeEngine(VOCABULARY)), Progress(), whole, stop)
        engine, progress = FakeEngine(VOCABULARY), Progress()
        train(job(dataset, engine, steps=15), progress, first, stop)
        engine.save_state(tmp_path)
        resumed = FakeEngine(VOCABULARY)
        resumed.load_state(tmp_path)
        assert progress == Progress(15, 60, tuple(first.losses))
        train(job(dataset, resumed), Progress(15, 60), second, stop)
    assert first.losses + second.losses == whole.losses


def test_signal_saves_and_stops(dataset: PackedDataset) -> None:
    hooks = Recorder(signal_at=7)
    with StopRequest() as stop, pytest.raises(Stopped, match="after saving step 7 of 40"):
        train(job(dataset, FakeEngine(VOCABULARY)), Progress(), hooks, stop)
    assert hooks.calls[-1] == ("stop", 7)


def test_signal_at_the_last_step_ends_normally(dataset: PackedDataset) -> None:
    hooks = Recorder(signal_at=STEPS)
    with StopRequest() as stop:
        train(job(dataset, FakeEngine(VOCABULARY)), Progress(), hooks, stop)
    assert hooks.calls[-2:] == [("save", STEPS), ("evaluate", STEPS)]


def test_finished_run_does_nothing(dataset: PackedDataset) -> None:
    hooks = Recorder()
    with StopRequest() as stop:
        train(job(dataset, FakeEngine(VOCABULARY)), Progress(STEPS, 0), hooks, stop)
    assert hooks.calls == []
