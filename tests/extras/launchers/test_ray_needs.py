"""What `dmt doctor` says about Ray."""

import pytest

from toolkit.doctor import packages
from toolkit.doctor.needs import Needs
from toolkit.doctor.probe import Answer


def test_the_part_that_is_used_is_installed_and_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ray` alone lacks Ray Train."""
    (ray,) = (package for package in packages.PACKAGES if package.name == "ray")
    asked: list[str] = []
    monkeypatch.setattr(
        packages, "ask_python", lambda code: asked.append(code) or Answer(True, "")
    )
    packages._import_failure(ray, "launch.launcher: ray")
    assert asked == ["import ray.train"]
    monkeypatch.setattr(packages, "is_installed", lambda _: False)
    (absent,) = packages._package(ray, Needs())
    assert absent.fix.startswith("pip install 'ray[train]>=")
    assert absent.found == "not installed; `launch.launcher: ray` needs it"
