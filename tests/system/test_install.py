"""Commands that install what is missing: never a distribution that is not ours."""

import re
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


def test_no_message_names_a_stranger() -> None:
    """Every `pip install NAME` of the code is of a package that DMT knows; neither code nor
    pages name `dmt` or `toolkit`, which are other projects on PyPI."""
    lines = [*PROJECT["dependencies"], *(one for extra in STATED.values() for one in extra)]
    known = {Requirement(line).name for line in lines}
    for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("toolkit/**/*.py")]:
        text = file.read_text(encoding="utf-8").replace("`pip install dmt` installs a str", "")
        for name in re.findall(r"pip install (?:-\S+ )*['\"]?([a-z][\w-]*)", text):
            assert name not in ("dmt", "toolkit"), file
            assert name in known or file.suffix == ".md", (file, name)
