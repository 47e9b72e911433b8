"""What Megatron-LM, FSDP2 and the Trainer saved, imported and continued: the losses of their
own next steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dmt import Dmt
from tests.e2e import foreign_savers
from tests.e2e.conftest import Project, write_project
from tests.e2e.deepspeed_saver import FURTHER, SAVED_AT
from tests.e2e.foreign_savers import MegatronCase
from tests.e2e.importing import TOLERANCE, continued
from tests.e2e.product import curve
from tests.forked import run_ranks
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.verify import verify
from toolkit.intake.load import load_recipe

pytestmark = pytest.mark.slow

MEGATRON = {
    "tp2": MegatronCase({"tp": 2}, "fully_reshardable"),
    "pp2-own": MegatronCase({"pp": 2}, "", tied=False),
    "tp2-flat": MegatronCase({"tp": 2}, "dp_reshardable", tied=False),
    "pp2-flat": MegatronCase({"pp": 2}, "dp_reshardable"),
    "dp2-flat": MegatronCase({"dp": 2}, "dp_reshardable"),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("formats")
    write_project(folder)
    return Project(folder)


def imported(project: Project, dmt: Dmt, source: Path, overrides: list[str]) -> Any:
    words = [word for one in overrides for word in ("--set", one)]
    run = project.folder / f"run-{source.parent.name}-{source.name}"
    return dmt(
        "checkpoint", "import", project.recipe, source, "--run-dir", run, *words, "--json"
    ).json


def check(
    project: Project, dmt: Dmt, source: Path, overrides: list[str], losses: list[float]
) -> Any:
    """Import `source`, and continue with plain transformers and torch."""
    report = imported(project, dmt, source, overrides)
    folder = Path(report["folder"])
    assert (report["step"], report["consumed_samples"]) == (SAVED_AT, 8 * SAVED_AT)
    assert verify(folder).problems == ()
    recipe = load_recipe(project.recipe, overrides)
    assert continued(SavedState(folder), recipe, folder) == pytest.approx(losses, rel=TOLERANCE)
    return report


@pytest.fixture(scope="module")
def megatron(project: Project) -> dict[str, list[float]]:
    saved = project.folder / "megatron"
    return run_ranks(foreign_savers.megatron, 2, project.folder, MEGATRON, saved)[-1]


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(
    name: str,
    project: Project,
    megatron: Mapping[str, list[float]],
    dmt: Dmt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(project.folder)
    source = project.folder / "megatron" / name
    check(project, dmt, source, MEGATRON[name].overrides, megatron[name])


@pytest.fixture(scope="module")
def fsdp(project: Project) -> list[float]:
    saved = project.folder / "fsdp"
    return run_ranks(foreign_savers.fsdp, 2, project.folder, [], saved)[0]


@pytest.mark.parametrize("name", ["nested", "flat", "checkpoint-2"])
def test_fsdp2(
    name: str, project: Project, fsdp: list[float], dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's get_state_dict returns it, flattened as torchtitan saves it, and as Accelerate
    saves it for the Trainer."""
    monkeypatch.chdir(project.folder)
    check(project, dmt, project.folder / "fsdp" / name, [], fsdp)


def test_trainer(project: Project, dmt: Dmt, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dmt launch` continues, with the schedule where it was."""
    monkeypatch.chdir(project.folder)
    steps = SAVED_AT + FURTHER
    changes = {"training.steps": steps, "schedule.name": "linear", "cluster.gpus_per_node": 1}
    words = [f"{key}={value}" for key, value in changes.items()]
    saved = project.folder / "trainer"
    (losses,) = run_ranks(foreign_savers.trainer, 1, project.folder, words, saved)
    report = imported(project, dmt, saved / f"checkpoint-{SAVED_AT}", words)
    assert not [note for note in report["notes"] if " was " in note], "settings that differ"
    run = Path(report["folder"]).parents[1]
    ended = project.launch(str(run), changes)
    assert f"continuing from step {SAVED_AT} of {steps}" in ended.err
    found = [loss for loss, _ in curve(run).values()]
    assert found == pytest.approx(losses, rel=TOLERANCE)
