"""What `dmt doctor` says of trackers."""

import pytest

from tests.processes import ROOT
from toolkit.doctor import packages
from toolkit.doctor.needs import Needs, needs_of
from toolkit.intake.load import load_recipe

TINY = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"


def test_the_packages_of_trackers_that_are_on() -> None:
    on = "logging={tensorboard: true, mlflow: {}, wandb: {mode: disabled}}"
    found = needs_of(load_recipe(TINY, [on])).packages
    assert {name: why for name, why in found.items() if why.startswith("logging.")} == {
        "tensorboard": "logging.tensorboard: true",
        "mlflow-skinny": "logging.mlflow",
        "sqlalchemy": "logging.mlflow",
        "alembic": "logging.mlflow",
    }


def test_a_fix_says_what_each_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda _: False)
    absent = [found for one in packages.PACKAGES for found in packages._package(one, Needs())]
    found = {one.name: one for one in absent}
    assert found["tensorboard"].fix.startswith("pip install 'tensorboard>=")
    assert found["trackio"].found == "not installed; `logging.trackio` needs it"
    own = "not installed; `logging.mlflow` with a database of its own needs it"
    assert found["alembic"].found == own
