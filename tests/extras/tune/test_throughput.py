"""`dmt tune`: real trials of a small recipe, with a fault in some layouts."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.dmt import Dmt
from tests.e2e import product
from tests.e2e.conftest import write_project
from tests.e2e.product import started
from tests.warm import SUBPROCESS, WarmPython
from toolkit.errors import DirectoryInUse, PlanError, RunFailed
from toolkit.extras.tune import layouts, study, trial
from toolkit.extras.tune.layouts import (
    LayoutStudy,
    differences,
    following,
    key_of,
    settings_of,
)
from toolkit.extras.tune.study import TrialRecord, TuneRequest
from toolkit.extras.tune.trial import Followed, TrialResult
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import explore
from toolkit.plan.search import Search
from toolkit.recipe.schema import Recipe
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory

CLUSTER = """nodes: 1
gpus_per_node: 2
gpu: cpu
measured:
  tflops: {fp32: 0.05}
  memory_gigabytes_per_s: 8.0
  node_link_gigabytes_per_s: 1.0
"""
FAULTS = {
    "training.micro_batch_size=1": "step=exit@rank1,hit2",
    "training.micro_batch_size=2": "step=hang@rank1,hit3",
}
"""What happens in the layouts with these micro batches; the one with 4 is measured."""


@dataclass
class Starts:
    """Starts warm launchers in the place of `subprocess.Popen`, some with a fault."""

    commands: list[Sequence[str]] = field(default_factory=list)

    def popen(self, argv: Sequence[str], *, env: dict[str, str], **options: Any) -> WarmPython:
        self.commands.append(argv)
        faults = [fault for setting, fault in FAULTS.items() if setting in argv]
        env = env | {"DMT_FAILPOINTS": ";".join(faults)}
        return WarmPython(argv, env=env, **options)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    found = Starts()
    names = vars(SUBPROCESS) | {"Popen": found.popen}
    monkeypatch.setattr(trial, "subprocess", SimpleNamespace(**names))
    return found


@pytest.mark.slow
def test_layouts_that_die_and_hang_are_reported_and_a_killed_tuning_continues(
    tmp_path: Path, starts: Starts, dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    words = ["tune", recipe, "--steps", 3]
    words += ["--set", "training.micro_batch_size=auto", "--cluster", "cluster.yaml"]
    words += ["--set", "launch.hang_timeout_s=15"]
    folder = tmp_path / "runs" / "e2e-tune"
    with started(product.dmt(*map(str, words)), tmp_path) as command:
        command.wait_for((folder / "trials/0001/events.jsonl").exists, "the second trial")
        os.kill(command.process.pid, signal.SIGKILL)
        command.end(-signal.SIGKILL)

    dmt(*words, "--trials", 2)
    found = dmt(*words, "--json").json
    assert len(starts.commands) == 2, "no layout is measured twice"
    done, hung, failed = found["trials"]
    assert [one["ending"] for one in found["trials"]] == ["done", "hung", "failed"]
    assert failed["reason"] == "rank 1 failed with exit code 1"
    assert re.fullmatch(r"(rank 1 hung|all ranks waited) in step 3", hung["reason"])
    assert done["steps"] >= 5 and done["step_time_s"] > 0 and done["tokens_per_s"] > 0
    assert found["best"]["number"] == done["number"]

    tuned = tmp_path / "recipe.tuned.yaml"
    assert load_recipe(tuned).training.micro_batch_size == 4
    assert "extends: recipe.yaml" in tuned.read_text()
    shown = dmt(*words).out
    assert "done" in shown and "hung: " in shown and "failed: rank 1" in shown
    assert len(starts.commands) == 2

    dmt(*words, "--set", "training.global_batch_size=16", code=2)
    tuned.write_text("# Written by `dmt tune --search`: the other mode\n")
    assert "was not written by `dmt tune`" in dmt(*words, code=2).err


def test_strategies_come_first_and_then_what_differs_little_from_the_fastest() -> None:
    _, search = explored()
    times: dict[str, float | None] = {}
    order = []
    slow = 1.0
    while candidate := following(search, 12, times):
        order.append(candidate)
        # As on a machine where only tensor parallelism is fast, and pipelines do not run.
        layout = candidate.layout
        slow += 0.01
        time = None if layout.pp == 2 else slow * (0.1 if layout.tp == 2 else 1.0)
        times[key_of(settings_of(candidate))] = time
    assert len(order) == len({*order}) == 12
    strategies = search.strategies(6)
    count = len(strategies)
    assert count > 3 and order[:count] == strategies
    fastest = next(one for one in order if one.layout.tp == 2)
    assert all(differences(one, fastest) == 1 for one in order[count : count + 3])


TINY = Path("recipes/tiny/llama-bytes.yaml").resolve()


@cache
def explored() -> tuple[Recipe, Search]:
    recipe = load_recipe(TINY, "parallel.engine=auto")
    return recipe, explore(recipe)


def tuning(tmp_path: Path, steps: int = 3) -> LayoutStudy:
    """A study of a shipped recipe's layouts, as a command that starts opens it."""
    recipe, search = explored()
    return LayoutStudy(TuneRequest(TINY, (), recipe, tmp_path, 12, 60), search, steps)


def steps_of(*times: float) -> Callable[..., TrialResult]:
    """Runs of a trial with steps of these times, of which it may be stopped."""

    def run_trial(*arguments: Any, **_: Any) -> TrialResult:
        lines = [{"step": step, "step_time_s": time} for step, time in enumerate(times, 1)]
        for end in range(1, len(times) + 1):
            if arguments[3](Followed(lines[:end])):
                return TrialResult("stopped")
        return TrialResult("done")

    return run_trial


def test_failures_are_tried_again_until_one_layout_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = TrialResult("failed", "no such module")
    monkeypatch.setattr(study, "run_trial", lambda *_, **__: failed)
    for last in (4, 9):
        ended: list[TrialRecord] = []
        tuned = tuning(tmp_path)
        assert tuned.run(ended.append) and "one failed: no such module" in tuned.failure
        assert [one.number for one in ended] == [*range(last - 4, last + 1)], "the next would"
    monkeypatch.setattr(study, "run_trial", steps_of(*[2.0] * 5))
    measured = tuning(tmp_path)
    assert measured.run() and len(measured.counted()) == 12
    assert [one.ending for one in measured.records()] == ["done"] * 12
    assert tuning(tmp_path).left() == 0


def test_a_folder_that_cannot_be_continued(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("text " * 99)
    with pytest.raises(RunFailed, match="file is not a database"):
        tuning(tmp_path)
    (tmp_path / "study.db").unlink()
    tuning(tmp_path).study.set_user_attr("identity", {"kind": "loss"})
    with pytest.raises(PlanError, match="trials of another recipe"):
        tuning(tmp_path)


def test_a_trial_that_a_signal_ended_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start repeats it, in its folder."""
    interrupted = TrialResult("interrupted")
    monkeypatch.setattr(study, "run_trial", lambda *_, **__: interrupted)
    assert not tuning(tmp_path).run() and not tuning(tmp_path).records()
    folders = []

    def run_trial(*arguments: Any, **_: Any) -> TrialResult:
        folders.append(arguments[2].name)
        return steps_of(*[2.0] * 5)(*arguments)

    monkeypatch.setattr(study, "run_trial", run_trial)
    gone = {"settings": {"parallel.pipeline": 99}, "folder": 1}  # no longer a layout
    tuning(tmp_path).study.enqueue_trial({}, user_attrs=gone)
    assert tuning(tmp_path).run()
    assert folders[:2] == ["0000", "0001"] and len({*folders}) == 12


def test_a_cpu_that_has_too_little_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    event = {"kind": "end", "exit_code": 4, "error": f"RuntimeError: {raised.value}"}
    assert trial._ending(4, [event], Path(os.devnull))[0] == "out_of_memory"


def test_a_point_that_the_recipes_rules_refuse(tmp_path: Path) -> None:
    """`dmt launch` judges it."""
    result = trial.run_trial(
        TINY, ["optimizer.learning_rate=1e-6"], tmp_path, lambda _: False,
        hang_s=60, interrupted=lambda: False, options=(),
    )  # fmt: skip
    assert result.ending == "refused" and "schedule.min_learning_rate" in result.reason


def test_a_trial_waits_for_ranks_of_a_killed_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as ranks:
        ranks.enter_context(claimed(RunDirectory(tmp_path)))
        monkeypatch.setattr(trial, "_ORPHANS_S", 0)
        with pytest.raises(DirectoryInUse):
            trial.wait_until_free(tmp_path)
        monkeypatch.setattr(trial, "_ORPHANS_S", 60)
        slept = SimpleNamespace(sleep=lambda _: ranks.close())
        monkeypatch.setattr(trial, "time", slept)
        trial.wait_until_free(tmp_path)


def test_what_a_trial_writes_last_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation at the end is the loss of a search, and is written as the run ends."""

    @contextmanager
    def ended(_: object, folder: Path) -> Iterator[SimpleNamespace]:
        (folder / "metrics.jsonl").write_text('{"step": 7}\n')
        yield SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(trial, "_started", ended)
    seen: list[int] = []
    result = trial.run_trial(
        Path("recipes/tiny/llama-bytes.yaml"), (), tmp_path,
        lambda followed: seen.append(len(followed.metrics)) is not None,
        hang_s=1, interrupted=lambda: False, options=(),
    )  # fmt: skip
    assert (result.ending, seen) == ("done", [1])


def test_a_layout_is_measured_by_the_lower_quartile_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two steps do not count, and none after the last that was asked for."""
    run_trial = steps_of(9, 9, 2, 2, 1.29, 2, 2, 1)
    monkeypatch.setattr(study, "run_trial", run_trial)
    tuned = tuning(tmp_path, 5)
    assert tuned.run()
    first, *_ = tuned.records()
    assert (first.ending, first.steps, first.value) == ("done", 7, 2)


def test_a_trial_of_a_run_that_moves_samples_is_no_mistake(tmp_path: Path) -> None:
    """It has no checkpoints, at which they move."""
    stated = {"parallel.balance": "auto", **layouts._WITHOUT}
    texts = [f"{key}={json.dumps(value)}" for key, value in stated.items()]
    load_recipe(write_project(tmp_path), [*texts, "cluster.gpus_per_node=2"])
