"""The study of a search, with a trial function that computes its losses."""

import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tests.dmt import Dmt
from tests.processes import ROOT
from toolkit.errors import EXIT_FAILED, PlanError, RecipeError
from toolkit.extras.tune import study
from toolkit.extras.tune.search import SearchStudy, first_rung
from toolkit.extras.tune.space import Space
from toolkit.extras.tune.study import RecordedEnding, TuneRequest
from toolkit.extras.tune.trial import Followed, TrialResult, check_waits
from toolkit.intake.load import load_recipe

TINY = ROOT / "recipes/tiny/llama-bytes.yaml"
EVERY = ("evaluation.every_steps=20", "schedule.min_learning_rate=0")
RATE = "optimizer.learning_rate"
NO_SPACE = ("--search", "/nonexistent")
DECAY = "optimizer.weight_decay"
SPACE_TEXT = f"{RATE}: {{low: 1.0e-4, high: 1, log: true}}\n{DECAY}: [0.0, 0.1, 1.0]"
SPACE = {
    RATE: FloatDistribution(1e-4, 1.0, log=True),
    DECAY: CategoricalDistribution(("0.0", "0.1", "1.0")),
}


class Runner:
    """Trials whose loss is lowest at a learning rate of 0.01."""

    def __init__(self, ending: RecordedEnding = "done", killed_in: int = -1) -> None:
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
        for trial in folder, *folder.parent.glob("*"):  # as if others ended trials now, too
            (trial / "checkpoints/step-00000020").mkdir(parents=True, exist_ok=True)
        number = int(folder.name)
        self.ran[number] = list(overrides)
        followed, done = Followed(), self.steps.setdefault(number, [])
        if self.ending not in ("done", "diverged"):
            return TrialResult(self.ending, "as it was told")
        try:
            rate = load_recipe(TINY, overrides).optimizer.learning_rate
        except RecipeError as error:
            return TrialResult("refused", str(error.problems[0]))
        for step in range(20, 201, 20):
            loss = (math.log10(rate) + 2) ** 2 + 100 / step
            loss = math.nan if self.ending == "diverged" else loss
            followed.events.append({"kind": "evaluation", "step": step, "loss": loss})
            done.append(step)
            if on_progress(followed):
                return TrialResult("stopped")
            if number == self.killed_in and step == 40:
                raise SystemExit  # as if the process were killed: Optuna is not told
            if interrupted():
                return TrialResult("interrupted")
        return TrialResult("done")


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


@pytest.mark.parametrize("ending", ["hung", "out_of_memory", "diverged"])
def test_trials_without_a_result(
    ending: RecordedEnding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmt: Dmt
) -> None:
    """A search gives up when nothing can be trained, and names the reason."""
    monkeypatch.setattr(study, "run_trial", Runner(ending))
    (tmp_path / "space.yaml").write_text(SPACE_TEXT)
    words = ["--search", tmp_path / "space.yaml", "--dir", tmp_path / "search", "--json"]
    words += [word for one in EVERY for word in ("--set", one)]
    printed = dmt("tune", TINY, *words, code=EXIT_FAILED)
    assert re.search(rf"none of 5 trials .* {ending}: (as it|loss is nan)", printed.err)
    told = {(one["ending"], one["loss"]) for one in printed.json["trials"]}
    assert told == {(ending, "NaN" if ending == "diverged" else None)}
    assert len(searched(tmp_path, Runner()).records()) == 5 + 8
    low = {RATE: FloatDistribution(1e-6, 1e-5)}
    failure = searched(tmp_path, Runner(), low, overrides=(), folder=tmp_path / "low").failure
    assert re.fullmatch(r"none of 20 trials .* refused: .*min_learning_rate.*", failure)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_searches_that_start_at_once(tmp_path: Path) -> None:
    """Optuna creates the tables of one folder once."""
    request = TuneRequest(TINY, EVERY, load_recipe(TINY, EVERY), tmp_path / "search", 8, 60)
    with ThreadPoolExecutor(4) as pool:
        assert len([*pool.map(lambda _: SearchStudy(request, SPACE), range(4))]) == 4


def test_rungs() -> None:
    """A quarter of the run, a step with a loss; half, if trials differ in their warm-up."""
    recipe = load_recipe(TINY, EVERY)
    assert first_rung(recipe, SPACE) == 60
    warm = {"schedule.warmup_steps": IntDistribution(0, 60)}
    assert first_rung(recipe, warm) == 100
    long = load_recipe(TINY, [*EVERY, "schedule.warmup_steps=70"])
    assert first_rung(long, SPACE) == 80
    assert first_rung(load_recipe(TINY, ["evaluation.every_steps=200"]), SPACE) is None


def test_a_launcher_that_does_not_wait() -> None:
    """Trials of one node are started by `local`; on two nodes they are refused."""
    check_waits(load_recipe(TINY, ["launch.launcher=slurm"]))
    with pytest.raises(PlanError, match="on one machine, the recipe has 2 nodes"):
        check_waits(load_recipe(TINY, ["launch.launcher=slurm", "cluster.nodes=2"]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seed", "5"], "--seed"),
        (["--dir", str(TINY)], "llama-bytes.yaml is a file"),
        ([*NO_SPACE, "--steps", "5"], "--steps"),
    ],
)
def test_no_option_is_ignored(options: list[str], said: str, dmt: Dmt) -> None:
    assert said in dmt("tune", TINY, *options, code=2).err
