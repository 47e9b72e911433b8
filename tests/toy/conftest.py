from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest

from tests.e2e.conftest import write_project
from tests.e2e.product import Ended, dmt, run, settings
from tests.processes import ROOT
from tests.warm import serve

HERE = Path(__file__).parent


def install(site: Path) -> Path:
    """Put the package of the toys into a folder."""
    information = site / "toy-0.0.dist-info"
    information.mkdir(parents=True)
    information.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy\nVersion: 0.0"
    )
    for path in (*HERE.glob("toy*.py"), HERE / "entry_points.txt"):
        copy(path, information if path.suffix == ".txt" else site)
    return site


@pytest.fixture(scope="session")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with the toys, which a server has imported."""
    path = f"{install(tmp_path_factory.mktemp('toys') / 'site')}:{ROOT}"
    serve(path)
    return path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where the toys are installed for a test that damages one."""
    return install(tmp_path / "site")


@pytest.fixture
def with_toys(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Ended]:
    """Run a verb of `dmt` on a changed small recipe, where the toys are installed."""
    recipe = write_project(tmp_path)
    if "site" in request.fixturenames:
        paths = {"PYTHONPATH": f"{request.getfixturevalue('site')}:{ROOT}"}
    else:
        paths = {"PYTHONPATH": request.getfixturevalue("python_path")}

    def start(changes: dict[str, object], name: str, *arguments: str) -> Ended:
        command = dmt(*name.split(), recipe, *settings(changes), *arguments)
        return run(command, tmp_path, paths)

    return start
