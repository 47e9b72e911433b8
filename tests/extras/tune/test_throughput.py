"""`dmt tune`: real trials of a small recipe, with a fault in some layouts."""

import json
import os
import re
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from toolkit.errors import DirectoryInUse, Stopped
from toolkit.extras.tune import throughput, trial
from toolkit.extras.tune.throughput import Judge, Tuning, differences, key_of, settings_of
from toolkit.extras.tune.trial import Followed, TrialResult
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import explore
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
    expected = dmt(*words, "--dry-run", "--json").json
    assert [one["layout"]["micro_batch"] for one in expected] == [4, 2, 1]
    assert not (tmp_path / "runs").exists()

    folder = tmp_path / "runs" / "e2e-tune"
    results = folder / "results.jsonl"
    # Cold: processes of a warm command do not end with it.
    with started(product.dmt(*map(str, words)), tmp_path, cold=True) as command:
        command.wait_for((folder / "trials/0001/events.jsonl").exists, "the second trial")
        os.kill(command.process.pid, signal.SIGKILL)
        command.end(-signal.SIGKILL)
    first = results.read_text()
    assert first.count("\n") == 1
    results.write_text(first + '{"number": 1, "lay')  # killed while it wrote

    dmt(*words, "--trials", 2)
    found = dmt(*words, "--json").json
    assert results.read_text().startswith(first)
    assert len(starts.commands) == 2, "no layout is measured twice"
    done, hung, failed = found["trials"]
    assert [one["ending"] for one in found["trials"]] == ["done", "hung", "failed"]
    assert failed["reason"] == "rank 1 failed with exit code 1"
    assert re.fullmatch(r"(rank 1 hung|all ranks waited) in step 3", hung["reason"])
    assert done["step"] >= 5 and done["step_time_s"] > 0 and done["tokens_per_s"] > 0
    assert found["best"]["number"] == done["number"]

    tuned = tmp_path / "recipe.tuned.yaml"
    assert load_recipe(tuned).training.micro_batch_size == 4
    assert "extends: recipe.yaml" in tuned.read_text()
    shown = dmt(*words).out
    assert "measured" in shown and "hung: " in shown and "failed: rank 1" in shown
    assert len(starts.commands) == 2

    dmt(*words, "--set", "training.global_batch_size=16", code=2)
    tuned.write_text("# Written by `dmt tune --search`: the other mode\n")
    assert "was not written by `dmt tune`" in dmt(*words, code=2).err


def test_strategies_come_first_and_then_what_differs_little_from_the_fastest() -> None:
    recipe = load_recipe("recipes/tiny/llama-bytes.yaml", "parallel.engine=auto")
    search = explore(recipe)
    tuning = Tuning(Path("x"), (), recipe, search, Path("x"), 12, 3, 60)
    times: dict[str, float | None] = {}
    order = []
    slow = 1.0
    while candidate := tuning.following(times):
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


def test_failures_are_tried_again_until_one_layout_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("recipes/tiny/llama-bytes.yaml").resolve()
    recipe = load_recipe(path, "parallel.engine=auto")
    tuning = throughput.Tuning(path, (), recipe, explore(recipe), tmp_path, 12, 3, 60)
    result = trial.TrialResult("failed", "no such module")
    monkeypatch.setattr(throughput, "run_trial", lambda *_, **__: result)
    assert [one.number for one in throughput.measure(tuning)] == [0, 1, 2, 3], "the next would"
    assert [one.number for one in throughput.measure(tuning)] == [4, 5, 6, 7]
    result = trial.TrialResult("done", step=5, step_time_s=2.0)
    last = [*throughput.measure(tuning)]
    assert len(last) == 12
    assert throughput.fastest(tuning.kept()) == last[0]
    assert not [*throughput.measure(tuning)], "nothing is left"


def test_a_trial_that_a_signal_ended_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("recipes/tiny/llama-bytes.yaml").resolve()
    recipe = load_recipe(path)
    tuning = throughput.Tuning(path, (), recipe, explore(recipe), tmp_path, 12, 3, 60)
    result = trial.TrialResult("interrupted")
    monkeypatch.setattr(throughput, "run_trial", lambda *_, **__: result)
    with pytest.raises(Stopped):
        next(throughput.measure(tuning))
    assert not tuning.read()


def test_a_cpu_that_has_too_little_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    event = {"kind": "end", "exit_code": 4, "error": f"RuntimeError: {raised.value}"}
    assert trial._ending(4, [event], Path(os.devnull))[0] == "out_of_memory"


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


def test_a_layout_is_given_up_when_its_fastest_step_of_three_is_too_slow() -> None:
    judge = Judge(5, 1.0)

    def answers(*times: float) -> list[bool]:
        lines = [{"step_time_s": time} for time in times]
        return [judge(Followed(lines[: n + 1])) for n in range(len(lines))]

    assert answers(9, 9, 2, 2, 1.29, 2, 2) == [False] * 6 + [True]
    assert judge.ending(TrialResult("stopped", step=7)) == ("done", "")
    assert answers(1, 1, 1.4, 1.31, 2) == [False] * 4 + [True]
    given_up = ("stopped", "at best 1.31 × the fastest after 5 steps")
    assert judge.ending(TrialResult("stopped", step=5)) == given_up


def test_a_trial_of_a_run_that_moves_samples_is_no_mistake(tmp_path: Path) -> None:
    """It has no checkpoints, at which they move."""
    stated = {"parallel.balance": "auto", **throughput._WITHOUT}
    texts = [f"{key}={json.dumps(value)}" for key, value in stated.items()]
    load_recipe(write_project(tmp_path), [*texts, "cluster.gpus_per_node=2"])
