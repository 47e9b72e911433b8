"""Commands that install what is missing: never a distribution that is not ours."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from toolkit.system import install

ROOT = Path(install.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STATED = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("extra", ["8bit", "mlflow", "ray", "tensorboard"])
def test_packages_of_an_extra(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in a checkout and, from what pip kept of the project file, in a wheel."""
    here = install.install(extra)
    assert here == f"pip install {' '.join(map(repr, STATED[extra]))}"
    monkeypatch.setattr(install, "_CHECKOUT", tmp_path)
    kept = [f"{line}; extra == '{name}'" for name, lines in STATED.items() for line in lines]
    monkeypatch.setattr(metadata, "requires", lambda _: [*kept, "torch>=2"])
    installed = {str(Requirement(one)) for one in install.install(extra)[13:-1].split("' '")}
    assert installed == {str(Requirement(one)) for one in STATED[extra]}


def test_no_message_names_the_distribution() -> None:
    """`dmt` on PyPI is another project."""
    for file in ROOT.joinpath("toolkit").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "pip install dmt" not in text and "pip install 'dmt" not in text, file
    assert install.source() == str(ROOT)
