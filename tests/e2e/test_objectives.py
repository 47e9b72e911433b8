"""An objective of another package, which only its entry point makes known."""

import math
from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import ROOT, curve, dmt, events, records, run, settings
from tests.warm import serve

ENTRY_POINTS = """
[dmt.objectives]
toy = tests.e2e.toy_objective:Toy
demanding = tests.e2e.toy_objective:Demanding
unordered = tests.e2e.toy_objective:Unordered
"""
TOY = {"training.objective": "toy"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package with the objective is installed."""
    site = tmp_path_factory.mktemp("site")
    info = site / "toy-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = f"{ROOT}:{site}"
    serve(path)
    return {"PYTHONPATH": path}


def test_check_and_plan_know_it(project: Project, installed: dict[str, str]) -> None:
    for verb in ("check", "plan"):
        run(dmt(verb, project.recipe, *settings(TOY)), project.folder, installed, code=0)
    unknown = run(dmt("check", project.recipe, *settings(TOY)), project.folder, code=2)
    assert "found    toy\n      allowed  one of pretrain, sft, dpo, orpo\n" in unknown.err


@pytest.mark.slow
def test_render_doctor_and_rehearse_know_it(
    project: Project, installed: dict[str, str]
) -> None:
    """A rehearsal compares losses that it defines itself: it takes one of those."""
    on_fsdp = {**TOY, "parallel.engine": "fsdp"}
    for verb, changes, *more in (
        ("render", on_fsdp),
        ("doctor", TOY),
        ("rehearse", TOY, "--layouts", "ddp"),
    ):
        argv = dmt(verb, project.recipe, *more, *settings(changes))
        ended = run(argv, project.folder, installed, code=0)
    assert "objective toy → pretrain" in ended.out + ended.err


@pytest.mark.slow
def test_it_trains(own_project: Project, ddp_run: Path, installed: dict[str, str]) -> None:
    changes: dict[str, object] = {**TOY, "training.steps": 6}
    own_project.launch("toy", changes, env=installed)
    lines = records(own_project.folder / "toy" / "metrics.jsonl")
    pretrained = curve(ddp_run)
    for line in lines:
        tokens = line["tokens"] / 8
        assert line["tokens_per_sequence"] == pytest.approx(tokens, rel=1e-12)
    assert lines[0]["loss"] == pytest.approx(pretrained[1][0] * lines[0]["tokens"] / 8)
    assert lines[-1]["loss"] < lines[0]["loss"]
    (validation,) = events(own_project.folder / "toy", "evaluation")
    assert validation["loss"] > math.log(10) * validation["tokens_per_sequence"] / 8
    assert not {"tokens_per_sequence"} & set(records(ddp_run / "metrics.jsonl")[0])


@pytest.mark.slow
def test_data_that_lacks_what_it_reads_is_refused(
    own_project: Project, installed: dict[str, str]
) -> None:
    ended = own_project.launch("no", {"training.objective": "demanding"}, env=installed, code=2)
    assert "Demanding reads margins, rewards, which the training data" in ended.err


@pytest.mark.slow
def test_an_operator_without_a_fixed_order_is_named(
    own_project: Project, installed: dict[str, str]
) -> None:
    changes: dict[str, object] = {"training.objective": "unordered", "training.steps": 2}
    own_project.launch("freely", changes, env=installed)
    changes["training.deterministic"] = True
    ended = own_project.launch("refused", changes, env=installed, code=4)
    assert "training.deterministic: put_ has no deterministic implementation" in ended.err
    assert "fix: set training.deterministic to false" in ended.err
    assert "Traceback" not in ended.err
