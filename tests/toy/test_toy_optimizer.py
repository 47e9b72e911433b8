"""An optimizer of another package, known to every verb by its entry point alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.product import Ended, curve, succeeded
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.store import folder_name

pytestmark = pytest.mark.slow
Verb = Callable[..., Ended]


@pytest.fixture
def verb(with_toys: Callable[..., Ended]) -> Verb:
    def start(name: str, *arguments: str, **changes: object) -> Ended:
        sgd = {"optimizer.name": "toy_sgd", "training.steps": 2, "parallel.engine": "ddp"}
        return with_toys({**sgd, **changes}, name, *arguments)

    return start


@pytest.mark.quick
def test_its_settings_are_checked(verb: Verb) -> None:
    succeeded(verb("check"))
    unused = verb("check", **{"optimizer.eps": 1e-3, "optimizer.muon.momentum": 0.5})
    assert "nothing: SGD has none" in unused.err
    assert "null without `name: muon`" in unused.err
    slip = verb("check", **{"optimizer.name": "toy_sgb"})
    assert "did you mean toy_sgd?" in slip.err


@pytest.mark.quick
def test_its_bytes_are_planned(verb: Verb) -> None:
    """One fp32 moment instead of two, and its line in the ledger."""
    (own,), (adamw,) = (
        json.loads(succeeded(verb("plan", "--json", "--top", "1", **changes)))["plans"]
        for changes in ({}, {"optimizer.name": "adamw"})
    )
    memory, more = own["memory_gib"], adamw["memory_gib"]
    assert memory["parameters"] == more["parameters"]
    assert memory["optimizer"] == more["optimizer"] / 2
    assert own["time_parts_s"]["optimizer"] == adamw["time_parts_s"]["optimizer"]
    entries = {entry["what"]: entry["why"] for entry in own["ledger"]}
    assert entries["optimizer states"] == "SGD with fp32 weights and momentum"
    assert "saved_bytes" in succeeded(verb("plan", "--explain"))


def test_it_trains(verb: Verb, tmp_path: Path) -> None:
    """And saves what it keeps."""
    succeeded(verb("launch", "--run-dir", "run", **{"checkpoint.every_steps": 1}))
    assert len(curve(tmp_path / "run")) == 2
    state = SavedState(tmp_path / "run" / "checkpoints" / folder_name(2))
    assert {quantity for quantity, _ in state.names()} == {"weight", "exp_avg"}


def test_it_is_rehearsed(verb: Verb) -> None:
    """Equal to its reference, in layouts that hold whole tensors, rows and slices."""
    chosen = ("--layouts", "fsdp3,zero2,megatron-tp2", "--steps", "2")
    record = json.loads(succeeded(verb("rehearse", *chosen, "--json")))
    verdicts = {layout["name"]: layout["verdict"] for layout in record["layouts"]}
    assert len(verdicts) == 3
    assert {*verdicts.values()} <= {"exact", "within"}


def test_doctor_looks_for_its_packages(verb: Verb) -> None:
    ended = verb("doctor", "--json")
    assert ended.code == 3, ended.err
    found = {one["name"]: one for one in json.loads(ended.out)["findings"]}
    assert found["toy"]["level"] == "ok"
    missing = found["toy-sgd"]
    assert (missing["level"], missing["needed_by"]) == ("problem", "optimizer.name: toy_sgd")


def test_one_that_cannot_be_imported_is_an_error_where_it_is_chosen(
    with_toys: Verb, site: Path
) -> None:
    (site / "toy_optimizer.py").write_text("import toy_sgd\n")
    succeeded(with_toys({}, "check"))
    ended = with_toys({"optimizer.name": "toy_sgd"}, "check")
    assert ended.code == 3
    assert ended.err == (
        "dmt: toy_sgd, which another package adds to dmt.optimizers as toy_optimizer:SGD, "
        "cannot be imported: No module named 'toy_sgd'\n  fix: repair or uninstall that "
        "package\n"
    )
