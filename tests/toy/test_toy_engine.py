"""An engine of another package, known to every verb by its entry point alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.product import Ended, curve, succeeded

Verb = Callable[..., Ended]
pytestmark = pytest.mark.slow
TOY = {"parallel.engine": "toy", "training.steps": 3}


@pytest.fixture
def verb(with_toys: Callable[..., Ended]) -> Verb:
    def start(name: str, *arguments: str, engine: str = "toy") -> Ended:
        return with_toys({**TOY, "parallel.engine": engine}, name, *arguments)

    return start


@pytest.mark.quick
def test_it_is_planned_and_rendered(verb: Verb) -> None:
    succeeded(verb("check"))
    assert json.loads(succeeded(verb("plan", "--json")))["plans"][0]["engine"] == "toy"
    rendered = {"ranks": 2, "precision": "fp32"}
    assert json.loads(succeeded(verb("render"))) == rendered
    assert json.loads(succeeded(verb("render", "--to", "toy"))) == rendered
    other = verb("render", "--to", "toy", engine="ddp")
    assert "runs on the engine ddp, which reads no toy configuration" in other.err
    accelerate = verb("render", "--to", "accelerate")
    assert "runs on the engine toy, which an Accelerate script cannot use" in accelerate.err
    assert "fix: --set parallel.engine=deepspeed" in accelerate.err


@pytest.mark.quick
def test_a_slip_of_its_name_is_understood(verb: Verb) -> None:
    ended = verb("check", engine="tyo")
    assert ended.code == 2
    assert "did you mean toy?" in ended.err


def test_a_package_that_cannot_be_imported_is_named(verb: Verb, site: Path) -> None:
    (site / "toy.py").write_text("import toy_kernels\n")
    ended = verb("render")
    assert ended.code == 3
    assert ended.err == (
        "dmt: toy, which another package adds to dmt.engines as toy:BACKEND, cannot be "
        "imported: No module named 'toy_kernels'\n  fix: repair or uninstall that package\n"
    )


def test_it_trains(verb: Verb, tmp_path: Path) -> None:
    ended = verb("launch", "--run-dir", "run")
    succeeded(ended)
    losses = [loss for loss, _ in curve(tmp_path / "run").values()]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert json.loads((tmp_path / "run" / "toy.json").read_text())["ranks"] == 2
    printed = "".join(path.read_text() for path in tmp_path.glob("run/**/*.log"))
    assert "rank 1 trains with the toy" in printed


def test_it_is_rehearsed(verb: Verb) -> None:
    """A layout of every rehearsal, whatever the recipe's own engine."""
    ended = verb("rehearse", "--layouts", "toy*", "--steps", "2", "--json", engine="ddp")
    (found,) = json.loads(succeeded(ended))["layouts"]
    assert (found["name"], found["engine"], found["world"]) == ("toy2", "toy", 2)
    assert found["verdict"] in ("exact", "within")


def test_doctor_looks_for_its_packages(verb: Verb) -> None:
    """One that it is made of, and one that is not installed."""
    ended = verb("doctor", "--json")
    assert ended.code == 3, ended.err
    found = {one["name"]: one for one in json.loads(ended.out)["findings"]}
    assert (found["toy"]["level"], found["toy"]["found"]) == ("ok", "0.0")
    missing = found["toy-kernels"]
    assert (missing["level"], missing["needed_by"]) == ("problem", "parallel.engine: toy")
    assert missing["fix"] == "pip install 'toy-kernels'"
