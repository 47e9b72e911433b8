"""`dmt runs`, `dmt report` of several runs, and what they read of a run directory."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.dmt import Dmt
from tests.report.logs import KILLED_AND_RESTARTED, event, metrics, write_run

RECIPE = """\
name: one
data: {train: [{label: a, weight: 0.5}, {label: b, weight: 0.5}]}
optimizer: {learning_rate: 0.003}
"""


def write(folder: Path, events: list[dict[str, Any]], lines: list[dict[str, Any]]) -> Path:
    write_run(folder, events, lines)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def age(run: Path, seconds: float) -> Path:
    """Let its files be that old."""
    for path in run.iterdir():
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))
    return run


def listed(folder: Path, dmt: Dmt) -> dict[str, Any]:
    found = dmt("runs", folder, "--json").json["runs"]
    return {Path(one["run"]).name: one for one in found}


def test_states(tmp_path: Path, dmt: Dmt) -> None:
    going = KILLED_AND_RESTARTED[:3]
    write(tmp_path / "going", going, metrics(12, 2.0))
    age(write(tmp_path / "done", KILLED_AND_RESTARTED, metrics(20, 2.0)), 60)
    stop = [event(40, "signal", signal="SIGTERM"), event(41, "end", step=12, exit_code=75)]
    age(write(tmp_path / "deeper/stopped", [*going, *stop], metrics(12, 2.0)), 7200)
    broke = event(41, "end", rank=1, step=12, exit_code=4, error="no memory\x1b[2J")
    age(write(tmp_path / "failed", [*going, broke], metrics(12, 2.0)), 7300)
    age(write(tmp_path / "killed", going, metrics(12, 2.0)), 7400)
    locked = age(write(tmp_path / "locked", going, metrics(12, 2.0)), 7500)
    with (locked / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = listed(tmp_path, dmt)
        assert [*found] == ["going", "done", "stopped", "failed", "killed", "locked"]
        states = {name: one["state"] for name, one in found.items()}
    assert states == {
        "going": "running", "done": "done", "stopped": "stopped", "failed": "failed",
        "killed": "failed", "locked": "running",
    }  # fmt: skip
    assert found["stopped"]["why"] == "SIGTERM"
    assert "SIGTERM or Ctrl-C" in dmt("runs", tmp_path).out, "the launcher sends one for both"
    assert found["failed"]["why"].startswith("rank 1: no memory")
    assert found["killed"]["why"] == "no end recorded, and silent for 2.1 h: killed?"
    assert (found["done"]["step"], found["done"]["loss"]) == (20, 4.8)
    assert found["locked"]["age_s"] == pytest.approx(7500, abs=60)
    assert listed(tmp_path, dmt)["locked"]["state"] == "failed", "its lock is free now"
    out = dmt("runs", tmp_path).out
    assert "\x1b" not in out and "no memory\\x1b[2J" in out
    assert f"{tmp_path}/done" in out and "4.8000" in out


def test_the_last_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmt: Dmt
) -> None:
    monkeypatch.chdir(tmp_path)
    age(write(Path("runs/old"), KILLED_AND_RESTARTED, metrics(20, 2.0)), 60)
    write(Path("runs/new"), KILLED_AND_RESTARTED[:3], metrics(12, 2.0))
    assert dmt("report").out.startswith("runs/new\n")
    monkeypatch.chdir(tmp_path / "runs/old")
    assert "no run in runs: no folder there has an events.jsonl" in dmt("report", code=2).err


def test_what_differs(tmp_path: Path, dmt: Dmt) -> None:
    lines = [line | {"tokens_per_s": 100.0} for line in metrics(10, 2.0)]
    first = write(tmp_path / "first", KILLED_AND_RESTARTED, lines)
    other = write(tmp_path / "other", KILLED_AND_RESTARTED, [])
    recipe = RECIPE.replace("one", "two").replace("b, weight: 0.5", "b, weight: 0.7")
    (other / "recipe.yaml").write_text(recipe + "adapter: {rank: 8}\n")
    # In the last digits from step 3, truly from step 5.
    factors = {3: 1 + 1e-12, 4: 1 + 1e-7, 5: 1.01}
    changed = [
        line | {"loss": line["loss"] * factors.get(line["step"], 1.0), "tokens_per_s": 110.0}
        for line in lines[:8]
    ]
    text = "".join(json.dumps(line) + "\n" for line in changed)
    (other / "metrics.jsonl").write_text(text + "not JSON\n" + '{"step": 9, "lo')
    found = dmt("report", first, other, "--json").json
    assert found["settings"] == {
        "data.train.1.weight": [0.5, 0.7], "adapter": [None, {"rank": 8}],
    }  # fmt: skip
    (one,) = found["compared_with_first"]
    assert (one["steps"], one["speed"]) == (8, pytest.approx(1.1))
    assert (one["unequal"]["step"], one["beyond"]["step"], one["last"]["step"]) == (3, 5, 8)
    out = dmt("report", first, other, first).out
    assert "differs first at step 3, by more than rounding at step 5: 4.9995 instead of" in out
    assert "equal to the last bit at all 10 steps logged in both" in out
    assert "; at step 8 4.92 instead of 4.92\n" in out
    assert "110 (+10.0%)" in out and "(-9.1%)" in dmt("report", other, first).out
    assert "                     first  other  first\n" in out
    assert "data.train.1.weight  0.5    0.7    0.5\nnot in all runs: adapter\n" in out


def test_nan_is_a_difference(tmp_path: Path, dmt: Dmt) -> None:
    lines = [line | {"loss": "NaN"} if line["step"] > 2 else line for line in metrics(4, 2.0)]
    healthy = write(tmp_path / "healthy", KILLED_AND_RESTARTED, metrics(4, 2.0))
    sick = write(tmp_path / "sick", KILLED_AND_RESTARTED, lines)
    out = dmt("report", healthy, sick, sick).out
    assert out.count("differs first at step 3: nan instead of 4.97") == 2
    assert "equal to the last bit at all 4 steps" in dmt("report", sick, sick).out


def test_a_damaged_recipe(tmp_path: Path, dmt: Dmt) -> None:
    run = write(tmp_path, KILLED_AND_RESTARTED, metrics(20, 2.0))
    (run / "recipe.yaml").write_text("{unclosed")
    assert f"{run}/recipe.yaml cannot be read: line 1" in dmt("report", run, code=2).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere", "nowhere"], "nowhere is not a run directory with events"),
        (["runs", "nowhere"], "no run in nowhere"),
    ],
)
def test_mistakes(arguments: list[str], message: str, dmt: Dmt) -> None:
    assert message in dmt(*arguments, code=2).err
