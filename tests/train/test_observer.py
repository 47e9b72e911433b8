"""What the observer tells the watchdog, and when it begins to save."""

from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.engines.base import StepResult
from toolkit.train.loop import Progress, StepReport
from toolkit.train.observer import HeartbeatBatches, Observer


def test_each_validation_batch_is_a_mark() -> None:
    marks: list[str] = []
    batches: list[Any] = ["a", "b", "c"]
    marked = HeartbeatBatches(batches, marks.append)
    assert (len(marked), list(marked)) == (3, batches)
    assert [mark.split(",")[1] for mark in marks[:3]] == [f" batch {n} of 3" for n in range(3)]


class Saves:
    """Stands where a run's checkpoints are: counting is all that is asked of it."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def tell(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def save(self, _engine: object, progress: Progress, _mark: object) -> None:
        self.steps.append(progress.step)


@pytest.mark.parametrize("stopped_at", [None, 5])
def test_no_save_begins_while_steps_are_skipped(
    monkeypatch: pytest.MonkeyPatch, stopped_at: int | None
) -> None:
    monkeypatch.setattr(Observer, "_metrics", lambda *_: None)
    saves, section = Saves(), SimpleNamespace(every_steps=2)
    plan = SimpleNamespace(layout=SimpleNamespace(world=1, model_rank=int))
    recipe = SimpleNamespace(
        checkpoint=section,
        logging=SimpleNamespace(every_steps=100, samples=False),
        guard=SimpleNamespace(replica_check_every_steps=None),
    )
    checkpoints = saves
    saves.saved_at = 0  # type: ignore[attr-defined]
    run: Any = SimpleNamespace(
        recipe=recipe,
        plan=plan,
        engine=None,
        ranks=SimpleNamespace(rank=0),
        checkpoints=checkpoints,
        prediction=None,
        mark=lambda _: None,
    )
    observer = Observer(run, None)
    for step in range(1, 11):
        skipped = "not finite" if step in (4, 5, 6) else None
        result = StepResult(1.0, 1.0, skipped)
        progress = Progress(step)
        observer.after_step(progress, StepReport(result, 0.1, 1, 0.1))
        observer.save(progress, stopping=step == stopped_at)
    expected = [2, 7, 8, 10] if stopped_at is None else [2, 5, 7, 8, 10]
    assert saves.steps == expected
