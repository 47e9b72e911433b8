"""What FSDP2 saved, imported and continued: the losses of its own next steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.dmt import Dmt
from tests.e2e.conftest import Project, write_project
from tests.e2e.deepspeed_saver import SAVED_AT
from tests.e2e.importing import TOLERANCE, continued
from tests.forked import run_ranks
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.verify import verify
from toolkit.intake.load import load_recipe

pytestmark = pytest.mark.slow


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


def _save(project: Path, out: Path) -> list[float]:
    from tests.e2e.torch_savers import save_fsdp  # its libraries, in the ranks alone

    return save_fsdp(project, out)


@pytest.fixture(scope="module")
def fsdp(project: Project) -> list[float]:
    saved = project.folder / "fsdp"
    return run_ranks(_save, 2, project.folder, saved)[0]


@pytest.mark.parametrize("name", ["nested", "flat", "checkpoint-2"])
def test_fsdp2(
    name: str, project: Project, fsdp: list[float], dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's get_state_dict returns it, flattened as torchtitan saves it, and as Accelerate
    saves it for the Trainer."""
    monkeypatch.chdir(project.folder)
    check(project, dmt, project.folder / "fsdp" / name, [], fsdp)
