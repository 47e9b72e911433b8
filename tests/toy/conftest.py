from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest

from tests.e2e.conftest import write_project
from tests.e2e.product import Ended, dmt, run, settings
from tests.processes import ROOT

HERE = Path(__file__).parent


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where the package of the toys is installed."""
    site = tmp_path / "site"
    information = site / "toy-0.0.dist-info"
    information.mkdir(parents=True)
    information.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy\nVersion: 0.0"
    )
    for path in (*HERE.glob("toy*.py"), HERE / "entry_points.txt"):
        copy(path, information if path.suffix == ".txt" else site)
    return site


@pytest.fixture
def with_toys(site: Path, tmp_path: Path) -> Callable[..., Ended]:
    """Run a verb of `dmt` on a changed small recipe, where the toys are installed."""
    recipe = write_project(tmp_path)
    paths = {"PYTHONPATH": f"{site}:{ROOT}"}

    def start(changes: dict[str, object], name: str, *arguments: str) -> Ended:
        command = dmt(*name.split(), recipe, *settings(changes), *arguments)
        return run(command, tmp_path, paths)

    return start
