"""The page of a report: what is in it, without a browser."""

import json
import math
import random
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tests.dmt import Dmt
from tests.processes import ROOT
from tests.report.logs import HOSTILE, KILLED_AND_RESTARTED, event, metrics
from tests.report.logs import write_run as write
from toolkit.extras.page import page, page_data
from toolkit.extras.page.charts import curve, kept
from toolkit.intake.load import load_recipe
from toolkit.recipe.dump import dump_recipe
from toolkit.report.record import read_record


def data_of(*runs: Path) -> dict[str, Any]:
    return page_data([read_record(run) for run in runs])


def chart(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    (found,) = [one for one in data["charts"] if one["id"] == name]
    lines: list[dict[str, Any]] = found["lines"]
    return lines


def section(data: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = [one for one in data["runs"][0]["sections"] if one["title"] == title]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("length", [0, 1, 7, 800, 801, 12_345])
def test_thinning_keeps_the_extremes(length: int) -> None:
    chance = random.Random(length)
    values = [chance.gauss(0, 1) for _ in range(length)]
    for at in chance.sample(range(length), min(length, 3)):
        values[at] = math.nan
    found = kept(values, 400)
    assert len(found) <= 3 * 400 + 2 and [*found] == sorted(set(found))
    if length <= 800:
        assert [*found] == [*range(length)]
        return
    finite = {value for value in values if not math.isnan(value)}
    drawn = [values[at] for at in found]
    assert {min(finite), max(finite)} <= set(drawn)
    assert any(map(math.isnan, drawn)), "a gap stays a gap"
    assert (found[0], found[-1]) == (0, length - 1)
    for bucket in range(400):
        start, stop = (length * edge // 400 for edge in (bucket, bucket + 1))
        part = [value for value in values[start:stop] if not math.isnan(value)]
        assert {min(part), max(part)} <= set(drawn)


def test_a_curve_has_a_value_for_each_step() -> None:
    lines = [*metrics(20, 2.0, every=5), {"loss": 1.0}, {"step": 10, "loss": 9.0}]
    assert curve(lines, "loss") == {1: 4.99, 5: 4.95, 10: 9.0, 15: 4.85, 20: 4.8}
    assert not curve(lines, "nothing")


def test_marks_and_curves(tmp_path: Path) -> None:
    lines = [line | {"grad_norm": "NaN" if line["step"] == 15 else 1.0, "chosen": 0.5}
             for line in metrics(20, 2.0)]  # fmt: skip
    more = {"restart": {"from_step": 10}, "evaluation": {"validation/code": 3.5}}
    events = [one | more.get(one["kind"], {}) for one in KILLED_AND_RESTARTED]
    data = data_of(write(tmp_path, events, lines))
    (run,) = data["runs"]
    assert [mark["step"] for mark in run["marks"]] == [10, 10, 15]
    head, *rows = section(data, "What happened")["table"]
    assert head[0] == "step" and [row[:2] for row in rows] == [
        ["10", "restarted"], ["10", "resumed"], ["15", "skipped"],
    ]  # fmt: skip
    assert rows[-1][-1] == "loss is not finite"
    training, validation, source = chart(data, "loss")
    assert (source["label"], source["y"]) == ("validation/code", [3.5])
    assert training["y"][0] == 4.99 and training["step"] == [*range(1, 21)]
    assert (validation["step"], validation["y"]) == ([20], [4.5])
    (norm,) = chart(data, "grad_norm")
    assert norm["y"][14] is None and norm["y"].count(1.0) == 19
    assert chart(data, "chosen")[0]["y"] == [0.5] * 20, "an objective's own metric"
    amounts = {name: amount for name, amount, _ in section(data, "Where the time went")["bar"]}
    assert amounts["productive"] == 38 and sum(amounts.values()) == pytest.approx(85)
    assert not [one for one in data["charts"] if one["id"] in ("mfu", "memory_gib")]


PLAN = {
    "engine": "ddp", "model": "hf", "mfu": 0.5, "tokens_per_s_per_gpu": 3.0,
    "layout": {"dp": 2, "tp": 2, "pp": 1, "cp": 1}, "reasons": ["it is the only one"],
    "predicted": {"step_time_s": 1.5, "memory_gib": 70.0, "basis": "data sheet"},
    "predicted_parts": {
        "memory_gib": {"weights": 40.0, "activations": 30.0, "none": 0}, "step_time_s": {},
    },
}  # fmt: skip


def test_predictions(tmp_path: Path) -> None:
    lines = [line | {"memory_gib": 60.0 + line["step"], "tokens_per_s": 7.0, "mfu": 0.4}
             for line in metrics(20, 2.0)]  # fmt: skip
    run = write(tmp_path, KILLED_AND_RESTARTED, lines)
    (run / "plan.json").write_text(json.dumps(PLAN))
    data = data_of(run)
    promised = {"step_time_s": 1.5, "memory_gib": 70.0, "mfu": 0.5, "tokens_per_s": 12.0}
    for name, value in promised.items():
        line = chart(data, name)[-1]
        assert (line["label"], line["step"], line["y"]) == ("predicted", [1, 20], [value] * 2)
    memory = section(data, "Memory, as predicted")
    assert [part[0] for part in memory["bar"]] == ["weights", "activations"]
    assert memory["note"] == "Measured: 80.00 GiB at most on the fullest rank."
    assert section(data, "Plan")["items"] == ["it is the only one"]
    (fact,) = section(data, "Plan")["facts"]
    assert fact == ["layout", "ddp dp2 tp2, micro batch 1 × 1"]


def test_a_thinned_curve_and_left_out_marks_are_told(tmp_path: Path) -> None:
    skips = [event(step, "skip", step=step) for step in range(1, 206)]
    long, short = (write(tmp_path / name, skips, metrics(steps, 2.0))
                   for name, steps in (("long", 10_000), ("short", 800)))  # fmt: skip
    units = [data_of(run)["charts"][0]["unit"] for run in (long, short)]
    assert ["thinned" in unit for unit in units] == [True, False]
    assert len(page(data_of(long))) < 300_000
    assert section(data_of(long), "What happened")["note"] == "The last 200 of 205."


def test_recipe_next_to_its_defaults(tmp_path: Path) -> None:
    run = write(tmp_path, KILLED_AND_RESTARTED, [])
    recipe = load_recipe(ROOT / "recipes/tiny/llama-bytes.yaml", ["training.seed=5"])
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    found = section(data_of(run), "Recipe")
    settings = dict(found["table"][1:])
    assert settings["training.seed"] == "5" and "schedule.decay_steps" not in settings
    assert "decay_steps: null" in found["text"]
    (run / "recipe.yaml").write_text("name: x\nnot: known\n")
    found = section(data_of(run), "Recipe")
    assert "another release's" in found["note"] and "not: known" in found["text"]


def test_nothing_is_markup(tmp_path: Path) -> None:
    lines = [line | {HOSTILE: 1.0} for line in metrics(5, 2.0)]
    ended = event(11, "end", exit_code=4, step=5, error=HOSTILE)
    run = write(tmp_path, [event(0, "launch"), event(1, "start", step=0), ended], lines)
    (run / "plan.json").write_text(json.dumps(PLAN | {"reasons": [HOSTILE], "engine": HOSTILE}))
    text = page(data_of(run))
    assert "<script>alert" not in text and "<img" not in text and "\u202e" not in text
    (embedded,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
    )
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert json.loads(embedded)["charts"][-1]["id"] == shown
    assert escape(shown) in text and len(text) < 300_000


def test_several_runs(tmp_path: Path) -> None:
    first = write(tmp_path / "a/one", KILLED_AND_RESTARTED, metrics(20, 2.0))
    other = write(tmp_path / "b/two", KILLED_AND_RESTARTED[:3], metrics(10, 2.0))
    (first / "recipe.yaml").write_text("optimizer: {learning_rate: 0.1}\n")
    (other / "recipe.yaml").write_text("optimizer: {learning_rate: 0.2}\n")
    data = data_of(first, other)
    assert [run["name"] for run in data["runs"]] == ["a/one", "b/two"]
    assert data["comparison"]["table"] == [
        ["setting", "a/one", "b/two"], ["optimizer.learning_rate", "0.1", "0.2"],
    ]  # fmt: skip
    assert "equal to the last bit at all 10 steps" in data["comparison"]["items"][0]
    assert {line["run"] for line in chart(data, "loss")} == {0, 1}
    assert data_of(first)["comparison"] is None


def test_the_command_replaces_nothing_but_a_page(tmp_path: Path, dmt: Dmt) -> None:
    run = write(tmp_path / "run", KILLED_AND_RESTARTED, metrics(20, 2.0))
    page = tmp_path / "page.html"
    for runs in ((run,), (run, run)):
        assert f"report {page}" in dmt("report", *runs, "--html", page).err
        assert page.read_text().startswith("<!doctype html>")
    events = (run / "events.jsonl").read_bytes()
    for path in (run / "events.jsonl", tmp_path, Path("/"), Path()):
        assert f"--html: {path} " in dmt("report", run, "--html", path, code=2).err
    assert "into no" in dmt("report", run, "--html", Path("no/such.html"), code=2).err
    assert (run / "events.jsonl").read_bytes() == events
