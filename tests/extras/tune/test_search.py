"""The study of a search, with a trial function that computes its losses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tests.dmt import Dmt
from tests.processes import ROOT
from toolkit.errors import PlanError, RunFailed
from toolkit.extras.tune import study
from toolkit.extras.tune.search import SearchStudy, first_rung
from toolkit.extras.tune.space import Space
from toolkit.extras.tune.study import TuneRequest
from toolkit.extras.tune.trial import (
    Ending,
    Followed,
    TrialResult,
    check_waits,
)
from toolkit.intake.load import load_recipe

TINY = ROOT / "recipes/tiny/llama-bytes.yaml"
EVERY = ("evaluation.every_steps=20", "schedule.min_learning_rate=0")
RATE = "optimizer.learning_rate"
NO_SPACE = ("--search", "/nonexistent")
SPACE = {
    RATE: FloatDistribution(1e-4, 1.0, log=True),
    "optimizer.weight_decay": CategoricalDistribution(("0.0", "0.1", "1.0")),
}


class Runner:
    """Trials whose loss is lowest at a learning rate of 0.01."""

    def __init__(self, ending: Ending = "done", killed_in: int = -1) -> None:
        self.ending, self.killed_in = ending, killed_in
        self.ran: dict[int, list[str]] = {}
        self.steps: dict[int, list[int]] = {}

    def __call__(
        self,
        recipe: Path,
        overrides: Sequence[str],
        folder: Path,
        on_progress: Callable[[Followed], bool],
        *,
        hang_s: float,
        interrupted: Callable[[], bool],
        options: Sequence[str],
    ) -> TrialResult:
        del recipe, hang_s, options
        (folder / "checkpoints/step-00000020").mkdir(parents=True, exist_ok=True)
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
                raise SystemExit  # as if the process were killed: Optuna is not told
            if interrupted():
                return TrialResult("interrupted", step=step)
        return TrialResult("done", step=200)


def searched(
    tmp_path: Path, runner: Runner, space: Space = SPACE, **changes: Any
) -> SearchStudy:
    """A search whose trials are the runner's."""
    recipe = load_recipe(TINY, changes.get("overrides", EVERY))
    request = TuneRequest(TINY, EVERY, recipe, tmp_path / "search", 8, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "run_trial", runner)
        patch.setattr(study, "HEARTBEAT_S", 1)
        patch.setattr(study, "GRACE_S", 2)
        search = SearchStudy(replace(request, **changes), space)
        assert search.run()
    return search


def test_a_killed_search_continues(tmp_path: Path) -> None:
    """With the same settings, in the same folder; no other trial is run again."""
    first = Runner(killed_in=2)
    with pytest.raises(SystemExit):
        searched(tmp_path, first)
    second = Runner()
    search = searched(tmp_path, second)
    points = search.records()
    assert all(one.params for one in search.study.trials), "TPE learns from each"
    assert [*first.ran] == [0, 1, 2] and not {0, 1} & {*second.ran}
    assert second.ran[2] == first.ran[2]
    assert {one.number for one in points} == {0, 1, *second.ran} and len(points) == 8
    assert {one.ending for one in points} == {"done", "stopped"}
    with pytest.raises(PlanError, match="trials of another recipe"):
        searched(tmp_path, second, overrides=(*EVERY, "training.seed=2"))


def test_an_answer(tmp_path: Path) -> None:
    """Hopeless trials end early; the best is near 0.01, and only it keeps checkpoints."""
    search = searched(tmp_path, Runner(), trials=16)
    best = search.best()
    assert best is not None and 3e-3 < best.settings["optimizer.learning_rate"] < 3e-2
    assert search.ranked()[0] == best
    stopped = {one.steps for one in search.records() if one.ending == "stopped"}
    assert stopped and stopped <= {60, 120}
    kept = [one.parent.name for one in tmp_path.rglob("checkpoints")]
    assert kept == [f"{best.number:04d}"]


def test_trials_without_a_result(tmp_path: Path) -> None:
    """A search gives up when nothing can be trained, and names the reason."""
    with pytest.raises(RunFailed, match=r"none of 5 trials .* hung: as it was told"):
        searched(tmp_path, Runner("hung"))
    assert len(searched(tmp_path, Runner()).records()) == 5 + 8
    low = {RATE: FloatDistribution(1e-6, 1e-5)}
    with pytest.raises(RunFailed, match=r"none of 20 trials .* refused: .*min_learning_rate"):
        searched(tmp_path, Runner(), space=low, overrides=(), folder=tmp_path / "refused")


def test_rungs() -> None:
    """A quarter of the run, a step with a loss, and behind every trial's warm-up."""
    recipe = load_recipe(TINY, EVERY)
    assert first_rung(recipe, SPACE) == 60
    warm = {"schedule.warmup_steps": IntDistribution(0, 70)}
    assert first_rung(recipe, warm) == 80
    assert first_rung(load_recipe(TINY, ["evaluation.every_steps=200"]), SPACE) is None


def test_a_launcher_that_does_not_wait() -> None:
    """Trials of one node are started by `local`; on two nodes they are refused."""
    check_waits(load_recipe(TINY, ["launch.launcher=slurm"]))
    with pytest.raises(PlanError, match="slurm hands its jobs over"):
        check_waits(load_recipe(TINY, ["launch.launcher=slurm", "cluster.nodes=2"]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seed", "5"], "--seed is an option of --search only"),
        ([*NO_SPACE, "--steps", "5"], "--steps is no option of --search"),
        ([*NO_SPACE, "--dry-run"], "--dry-run is no option of --search"),
    ],
)
def test_no_option_is_ignored(options: list[str], said: str, dmt: Dmt) -> None:
    assert said in dmt("tune", TINY, *options, code=2).err
