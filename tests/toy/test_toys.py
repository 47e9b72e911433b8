"""An engine, an optimizer and an objective of another package, known to every verb by their
entry points."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.product import Ended, curve, events, records, succeeded
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.store import folder_name

Verb = Callable[..., Ended]
pytestmark = pytest.mark.slow
ENGINE: dict[str, object] = {"parallel.engine": "toy"}
OPTIMIZER: dict[str, object] = {"optimizer.name": "toy_sgd"}
TOYS: dict[str, object] = {**ENGINE, **OPTIMIZER, "training.steps": 3}


@pytest.mark.quick
def test_the_engine_is_planned_and_rendered(with_toys: Verb) -> None:
    assert (
        json.loads(succeeded(with_toys(TOYS, "plan", "--json")))["plans"][0]["engine"] == "toy"
    )
    rendered = {"ranks": 2, "precision": "fp32"}
    assert json.loads(succeeded(with_toys(ENGINE, "render"))) == rendered
    assert json.loads(succeeded(with_toys(ENGINE, "render", "--to", "toy"))) == rendered
    other = with_toys({"parallel.engine": "ddp"}, "render", "--to", "toy")
    assert "runs on the engine ddp, which reads no toy configuration" in other.err
    accelerate = with_toys(ENGINE, "render", "--to", "accelerate")
    assert "is planned as toy" in accelerate.err
    assert "fix: --set parallel.engine=deepspeed" in accelerate.err


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel.engine": "tyo"}, ["did you mean toy?"]),
        ({"optimizer.name": "toy_sgb"}, ["did you mean toy_sgd?"]),
        (
            OPTIMIZER | {"optimizer.eps": 1e-3},
            ["nothing: SGD has none"],
        ),
    ],
)
def test_settings_are_checked(
    with_toys: Verb, changes: dict[str, object], said: list[str]
) -> None:
    ended = with_toys(changes, "check")
    assert ended.code == 2 and all(one in ended.err for one in said), ended.err


@pytest.mark.quick
def test_the_bytes_of_the_optimizer_are_planned(with_toys: Verb) -> None:
    """One fp32 moment instead of two."""
    ddp = {"parallel.engine": "ddp"}
    own, adamw = (
        json.loads(succeeded(with_toys(ddp | changes, "plan", "--json")))["plans"][0]
        for changes in (OPTIMIZER, {})
    )
    memory, more = own["memory_gib"], adamw["memory_gib"]
    assert memory["parameters"] == more["parameters"]
    assert memory["optimizer"] == more["optimizer"] / 2


def test_they_train_together(with_toys: Verb, tmp_path: Path) -> None:
    succeeded(with_toys(TOYS, "launch", "--run-dir", "run"))
    assert len(curve(tmp_path / "run")) == 3
    assert json.loads((tmp_path / "run" / "toy.json").read_text())["ranks"] == 2
    printed = "".join(path.read_text() for path in tmp_path.glob("run/**/*.log"))
    assert "rank 1 trains with the toy" in printed
    state = SavedState(tmp_path / "run" / "checkpoints" / folder_name(3))
    assert {quantity for quantity, _ in state.names()} == {"weight", "exp_avg"}


def test_the_objective_trains(with_toys: Verb, tmp_path: Path) -> None:
    """A sum of the losses in place of their mean."""
    for name in ("pretrain", "toy_sum"):
        changes = {"training.objective": name, "training.steps": 3, "checkpoint.export": False}
        succeeded(with_toys(changes, "launch", "--run-dir", name))
    means = records(tmp_path / "pretrain" / "metrics.jsonl")
    sums = records(tmp_path / "toy_sum" / "metrics.jsonl")
    for line in sums:
        assert line["tokens_per_sequence"] == pytest.approx(line["tokens"] / 8, rel=1e-12)
    assert sums[0]["loss"] == pytest.approx(means[0]["loss"] * sums[0]["tokens"] / 8)
    assert sums[-1]["loss"] < sums[0]["loss"]
    (validation,) = events(tmp_path / "toy_sum", "evaluation")
    assert validation["loss"] > math.log(10) * validation["tokens_per_sequence"] / 8
    assert "tokens_per_sequence" not in means[0]


def test_they_are_rehearsed(with_toys: Verb) -> None:
    """The engine is a layout of every rehearsal; the optimizer equals its reference in layouts
    that hold whole tensors, rows and slices."""
    layouts = ("--layouts", "toy*,fsdp3,zero2,megatron-tp2")
    changes = OPTIMIZER | {"parallel.engine": "ddp"}
    ended = with_toys(changes, "rehearse", *layouts, "--steps", "2", "--json")
    found = {one["name"]: one for one in json.loads(succeeded(ended))["layouts"]}
    assert found.keys() == {"toy2", "fsdp3", "zero2", "megatron-tp2"}
    assert (found["toy2"]["engine"], found["toy2"]["world"]) == ("toy", 2)
    assert {one["verdict"] for one in found.values()} <= {"exact", "within"}


def test_doctor_looks_for_what_they_need(with_toys: Verb) -> None:
    """What is there, and what is not installed."""
    ended = with_toys(TOYS, "doctor", "--json")
    assert ended.code == 3, ended.err
    found = {one["name"]: one for one in json.loads(ended.out)["findings"]}
    assert (found["toy"]["level"], found["toy"]["found"]) == ("ok", "0.0")
    for name, needed_by, fix in (
        ("toy-kernels", "parallel.engine: toy", "pip install 'toy-kernels'"),
        ("toy-sgd", "optimizer.name: toy_sgd", "pip install 'toy-sgd'"),
    ):
        missing = found[name]
        assert (missing["level"], missing["needed_by"]) == ("problem", needed_by)
        assert missing["fix"] == fix


@pytest.mark.parametrize(
    ("file", "group", "named", "changes"),
    [
        ("toy.py", "engines", "toy:BACKEND", ENGINE),
        ("toy_optimizer.py", "optimizers", "toy_optimizer:SGD", OPTIMIZER),
    ],
)
def test_one_that_cannot_be_imported_is_named_where_it_is_chosen(
    with_toys: Verb, site: Path, file: str, group: str, named: str, changes: dict[str, object]
) -> None:
    (site / file).write_text("import its_kernels\n")
    ended = with_toys(changes, "launch", "--dry-run")
    assert ended.code == 3
    (name,) = changes.values()
    assert ended.err == (
        f"dmt: {name}, which another package adds to dmt.{group} as {named}, cannot be "
        "imported: No module named 'its_kernels'\n  fix: repair or uninstall that package\n"
    )
