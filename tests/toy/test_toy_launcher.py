"""A launcher of another package, known to every verb by its entry point alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.product import Ended, curve, succeeded

pytestmark = pytest.mark.slow
Verb = Callable[..., Ended]


@pytest.fixture
def verb(with_toys: Callable[..., Ended]) -> Verb:
    def start(name: str, *arguments: str, **changes: object) -> Ended:
        pair = {"launch.launcher": "pair", "launch.pair.niceness": 3, "training.steps": 3}
        return with_toys({**pair, **changes}, name, *arguments)

    return start


@pytest.mark.quick
def test_its_section_is_checked(verb: Verb) -> None:
    succeeded(verb("check"))
    wrong = verb("check", **{"launch.pair.niceness": -1})
    assert wrong.code == 2
    assert "launch.pair.niceness" in wrong.err and "an integer ≥ 0" in wrong.err


@pytest.mark.quick
def test_a_recipe_with_it_is_planned(verb: Verb) -> None:
    assert "ddp" in succeeded(verb("plan", "--explain", **{"parallel.engine": "ddp"}))


def test_it_trains(verb: Verb, tmp_path: Path) -> None:
    commands = succeeded(verb("launch", "--run-dir", "run", "--dry-run"))
    assert commands.count("nice -n 3 ") == 2
    assert not (tmp_path / "run").exists()
    ended = verb("launch", "--run-dir", "run")
    succeeded(ended)
    assert "starting 2 ranks (pair)" in ended.err
    assert len(curve(tmp_path / "run")) == 3


def test_what_it_cannot_start_is_refused(verb: Verb) -> None:
    ended = verb("launch", "--run-dir", "run", **{"cluster.gpus_per_node": 1})
    assert ended.code == 2
    assert "launcher pair starts 2 ranks, the recipe has 1" in ended.err


def test_a_recipe_with_it_is_rehearsed(verb: Verb) -> None:
    ended = verb("rehearse", "--layouts", "toy*", "--steps", "2", "--json")
    (layout,) = json.loads(succeeded(ended))["layouts"]
    assert layout["verdict"] in ("exact", "within")


def test_doctor_looks_for_its_programs(verb: Verb) -> None:
    ended = verb("doctor", "--json")
    assert ended.code == 3, ended.err
    findings = {finding["name"]: finding for finding in json.loads(ended.out)["findings"]}
    assert findings["nice"]["level"] == "ok"
    missing = findings["pair-top"]
    assert (missing["level"], missing["needed_by"]) == ("problem", "launch.launcher: pair")
    assert missing["fix"] == "pip install toy"


def test_one_that_cannot_be_imported_is_an_error_where_it_is_chosen(
    with_toys: Verb, site: Path
) -> None:
    (site / "toy_launcher.py").write_text("import pair_kernels\n")
    succeeded(with_toys({"training.steps": 3}, "launch", "--dry-run"))
    ended = with_toys({"launch.launcher": "pair"}, "launch", "--dry-run")
    assert ended.code == 3
    assert ended.err == (
        "dmt: pair, which another package adds to dmt.launchers as toy_launcher:PAIR, cannot "
        "be imported: No module named 'pair_kernels'\n  fix: repair or uninstall that package\n"
    )
