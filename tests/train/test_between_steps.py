"""What a run marks between its steps, and when it begins to save."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.fake_runs import fake_start
from toolkit.checkpoint.validation import ValidationHistory
from toolkit.engines.base import EvalResult, StepResult
from toolkit.layout import Layout
from toolkit.recipe.schema import EvaluationSection, ScheduleSection, TrainingSection
from toolkit.run.directory import RunDirectory
from toolkit.train.loop import StepReport, TrainingRun
from toolkit.train.reporter import MarkedBatches
from toolkit.train.shared import Progress


def test_each_validation_batch_is_a_mark() -> None:
    marks: list[str] = []
    batches: list[Any] = ["a", "b", "c"]
    marked = MarkedBatches(batches, marks.append)
    assert (len(marked), list(marked)) == (3, batches)
    assert [mark.split(",")[1] for mark in marks[:3]] == [f" batch {n} of 3" for n in range(3)]


class Saves:
    """Stands where a run's checkpoints are: counting is all that is asked of it."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.validated_before: list[bool] = []

    def tell(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def save(self, _engine: object, progress: Progress, _mark: object) -> None:
        self.steps.append(progress.step)
        self.validated_before.append(progress.validation.step == progress.step)

    def evaluate(self, _batches: object) -> EvalResult:
        return EvalResult(1.0, 1)


def new_run(
    folder: Path, saves: Saves, device: str = "cpu", follows: dict[str, str] | None = None
) -> TrainingRun:
    """One that saves every second step."""
    start = fake_start(
        Layout(),
        Progress(),
        checkpoint=SimpleNamespace(every_steps=2),
        training=TrainingSection(sequence_length=16, global_batch_size=8),
        follows_validation=follows or {},
        evaluation=EvaluationSection(every_steps=2),
        schedule=ScheduleSection(),
    )
    start.ranks.device, start.directory = torch.device(device), RunDirectory(folder)
    nothing: Any = None
    stand_in: Any = saves
    validation: Any = {"held out": tuple}
    return TrainingRun(start, stand_in, nothing, 1, validation, stand_in, None, 10)


def test_the_peak_of_memory_is_that_of_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Building the engine may take more."""
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    new_run(tmp_path, Saves())
    assert not reset
    new_run(tmp_path, Saves(), "cuda:1")
    assert reset == [torch.device("cuda", 1)]


@pytest.mark.parametrize("stopped_at", [None, 5])
def test_no_save_begins_while_steps_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped_at: int | None
) -> None:
    """Unless the run stops, which then compares itself with its prediction."""
    compared: list[int] = []
    monkeypatch.setattr(TrainingRun, "_metrics", lambda *_: None)
    monkeypatch.setattr(TrainingRun, "compare", lambda run: compared.append(run.progress.step))
    saves = Saves()
    run = new_run(tmp_path, saves)
    for step in range(1, 11):
        skipped = "not finite" if step in (4, 5, 6) else None
        result = StepResult(1.0, 1.0, skipped)
        run.progress.step = step
        run.log(StepReport(result, 0.1, 1, 8, 0.1))
        run.save(stopping=step == stopped_at)
    expected = [2, 7, 8, 10] if stopped_at is None else [2, 5, 7, 8, 10]
    assert saves.steps == expected
    assert compared == ([] if stopped_at is None else [stopped_at])


def test_a_validation_that_a_run_depends_on_comes_before_the_save(tmp_path: Path) -> None:
    """Unless the run stops, which has no time for it: then it is done when it continues."""
    saves = Saves()
    run = new_run(tmp_path, saves, follows={"checkpoint.keep_best": "1"})
    run.progress.step = 2
    run.save(stopping=False)
    assert run.progress.validation.step == 2
    run.progress.step = 4
    run.save(stopping=True)
    assert saves.validated_before == [True, False]
    assert run.progress.validation.step == 2
    for _ in range(2):
        run.evaluate()
        assert run.progress.validation == ValidationHistory(4, 1.0, 2, 1.0, 1), "once"
    plain = new_run(tmp_path, saves)
    plain.progress.step = 2
    plain.save(stopping=False)
    assert saves.validated_before[-1] is False
