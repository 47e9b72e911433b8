"""The study of a search, with a trial function that computes its losses."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.processes import ROOT
from toolkit.errors import PlanError, RunFailed
from toolkit.extras.tune.outcome import outcome_of
from toolkit.extras.tune.search import HyperparameterSearch, SearchRequest, first_rung
from toolkit.extras.tune.search_command import SearchOptions, request_of
from toolkit.extras.tune.space import Choices, Range, SearchSpace
from toolkit.extras.tune.trial import DeviceSlice, Ending, Followed, TrialResult, device_slices
from toolkit.intake.load import load_recipe

TINY = ROOT / "recipes/tiny/llama-bytes.yaml"
EVERY = ("evaluation.every_steps=20", "schedule.min_learning_rate=0")
SPACE = SearchSpace(
    (
        Range("optimizer.learning_rate", 1e-4, 1.0, log=True),
        Choices("optimizer.weight_decay", ("0.0", "0.1", "1.0")),
    )
)


class Killed(Exception):
    """Stands for a kill of the whole process."""


class Runner:
    """Trials whose loss is lowest at a learning rate of 0.01."""

    def __init__(self, ending: Ending = "done", killed_in: int = -1) -> None:
        self.ending, self.killed_in = ending, killed_in
        self.ran: dict[int, list[str]] = {}
        self.steps: dict[int, list[int]] = {}

    def __call__(
        self,
        overrides: Sequence[str],
        folder: Path,
        devices: DeviceSlice,
        on_progress: Callable[[Followed], bool],
        *,
        interrupted: Callable[[], bool],
    ) -> TrialResult:
        del devices
        number = int(folder.name)
        self.ran[number] = list(overrides)
        followed, done = Followed(), self.steps.setdefault(number, [])
        if self.ending != "done":
            return TrialResult(self.ending, "as it was told")
        rate = load_recipe(TINY, overrides).optimizer.learning_rate
        for step in range(20, 201, 20):
            loss = (math.log10(rate) + 2) ** 2 + 100 / step
            followed.events.append({"kind": "evaluation", "step": step, "loss": loss})
            done.append(step)
            if on_progress(followed):
                return TrialResult("stopped", step=step)
            if number == self.killed_in and step == 40:
                raise Killed
            if interrupted():
                return TrialResult("interrupted", step=step)
        return TrialResult("done", step=200)


def request(folder: Path, trials: int = 8) -> SearchRequest:
    return SearchRequest(TINY, EVERY, SPACE, folder / "search", trials, [DeviceSlice(0)])


def test_what_a_kill_left_is_continued(tmp_path: Path) -> None:
    """With the same settings, in the same folder; no other trial is run again."""
    first = Runner(killed_in=2)
    with pytest.raises(Killed):
        HyperparameterSearch(request(tmp_path), first).run()
    second = Runner()
    search = HyperparameterSearch(request(tmp_path), second)
    assert search.run()
    assert [*first.ran] == [0, 1, 2] and [*second.ran] == [2, 3, 4, 5, 6, 7]
    assert second.ran[2] == first.ran[2]
    trials = search.study.get_trials()
    assert [one.number for one in trials] == [*range(8)]
    assert all(one.state.is_finished() for one in trials)
    assert trials[2].intermediate_values.keys() >= {20, 40}
    with pytest.raises(PlanError, match="a search of another recipe"):
        other = replace(request(tmp_path), overrides=(*EVERY, "training.seed=2"))
        HyperparameterSearch(other, second)


def test_an_answer(tmp_path: Path) -> None:
    """Hopeless trials end early; the best is near 0.01, on which the importance depends."""
    search = HyperparameterSearch(request(tmp_path, 16), Runner())
    assert search.run()
    found = outcome_of(search)
    assert (
        found.best is not None and 3e-3 < found.best.settings["optimizer.learning_rate"] < 3e-2
    )
    assert {one.ending for one in found.points} == {"done", "stopped"}
    assert {one.steps for one in found.points if one.ending == "stopped"} <= {60, 120}
    assert found.importance["optimizer.learning_rate"] > 0.5


def test_trials_without_a_result(tmp_path: Path) -> None:
    """A search gives up when nothing can be trained, and names the reason."""
    with pytest.raises(RunFailed, match=r"none of 5 trials .* hung: as it was told"):
        HyperparameterSearch(request(tmp_path), Runner("hung")).run()
    mended = HyperparameterSearch(request(tmp_path), Runner())
    assert mended.run() and len(mended.study.get_trials()) == 5 + 8
    low = SearchSpace((Range("optimizer.learning_rate", 1e-6, 1e-5),))
    refused = replace(request(tmp_path), space=low, overrides=(), folder=tmp_path / "refused")
    with pytest.raises(PlanError, match="min_learning_rate"):
        HyperparameterSearch(refused, Runner()).run()


def test_rungs() -> None:
    """A quarter of the run, a step with a loss, and behind every trial's warm-up."""
    recipe = load_recipe(TINY, EVERY)
    assert first_rung(recipe, SPACE) == 60
    warm = SearchSpace((Range("schedule.warmup_steps", 0, 70, whole=True),))
    assert first_rung(recipe, warm) == 80
    assert first_rung(load_recipe(TINY, ["evaluation.every_steps=200"]), SPACE) is None


def test_slices_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores and ports of trials that run at a time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5})
    slices = device_slices(load_recipe(TINY).cluster, 2)
    assert not set(slices[0].ports) & set(slices[1].ports)
    assert [sorted(one.cores) for one in slices] == [[2, 3], [4, 5]]


def test_a_launcher_that_does_not_wait(tmp_path: Path) -> None:
    """Refused before anything is queued."""
    options = SearchOptions(
        tmp_path / "space.yaml",
        tmp_path / "search",
        None,
        8,
        1,
        0,
        True,
        300,
        False,
    )
    options.space.write_text("training.seed: [1, 2]\n")  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="slurm hands its jobs over"):
        request_of(TINY, [*EVERY, "launch.launcher=slurm"], options)
    assert request_of(TINY, [*EVERY, "launch.launcher=ray"], options).devices
