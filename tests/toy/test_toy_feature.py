"""A feature of another package, known to every verb by its entry point alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.product import Ended, curve, succeeded

pytestmark = pytest.mark.slow
Verb = Callable[..., Ended]
PLAIN = {"training.steps": 2, "parallel.engine": "ddp", "cluster.gpus_per_node": 2}
ON = PLAIN | {"scaled_loss.factor": 4.0}


@pytest.mark.quick
def test_its_section_is_checked(with_toys: Verb) -> None:
    succeeded(with_toys(ON, "check"))
    wrong = with_toys(ON | {"scaled_loss.factor": 0}, "check")
    assert wrong.code == 2
    assert "scaled_loss.factor" in wrong.err and "a number > 0" in wrong.err
    assert (
        "bf16 with scaled_loss" in with_toys(ON | {"training.precision": "bf16"}, "check").err
    )
    other = with_toys(PLAIN | {"loss_multiplier": 4.0}, "check")
    assert "write `scaled_loss.factor`" in other.err


@pytest.mark.quick
def test_its_cost_and_ledger_are_planned(with_toys: Verb) -> None:
    """Its gradients travel in twice the bytes of fp32."""
    own, plain = (
        json.loads(succeeded(with_toys(changes, "plan", "--json", "--top", "1")))["plans"][0]
        for changes in (ON, PLAIN)
    )
    assert own["step_time_s"] > plain["step_time_s"]
    entries = {entry["what"]: entry["why"] for entry in own["ledger"]}
    assert entries["scaled loss"] == "4 times the mean of the whole batch"
    assert succeeded(with_toys(ON, "plan", "--explain"))


def test_it_trains(with_toys: Verb, tmp_path: Path) -> None:
    runs = {"on": ON, "off": PLAIN}
    for name, changes in runs.items():
        succeeded(with_toys(changes, "launch", "--run-dir", name))
    first, plain = (next(iter(curve(tmp_path / name).values()))[0] for name in runs)
    assert first == pytest.approx(4 * plain, rel=1e-6)


def test_it_is_rehearsed(with_toys: Verb) -> None:
    chosen = ("--layouts", "zero2,fsdp3", "--steps", "2")
    record = json.loads(succeeded(with_toys(ON, "rehearse", *chosen, "--json")))
    verdicts = {layout["verdict"] for layout in record["layouts"]}
    assert len(record["layouts"]) == 2 and verdicts <= {"exact", "within"}


def test_doctor_looks_for_its_packages(with_toys: Verb) -> None:
    ended = with_toys(ON, "doctor", "--json")
    findings = {one["name"]: one for one in json.loads(ended.out)["findings"]}
    assert findings["toy-scales"]["needed_by"] == "scaled_loss"
