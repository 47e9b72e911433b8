"""What `dmt doctor` says of trackers."""

from tests.processes import ROOT
from toolkit.doctor.needs import needs_of
from toolkit.intake.load import load_recipe

TINY = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"


def test_the_packages_of_trackers_that_are_on() -> None:
    on = "logging.trackers=[tensorboard, mlflow]"
    found = needs_of(load_recipe(TINY, [on])).packages
    assert {name: why for name, why in found.items() if why.startswith("logging.")} == {
        "tensorboard": "logging.trackers: tensorboard",
        "mlflow-skinny": "logging.trackers: mlflow",
        "sqlalchemy": "logging.trackers: mlflow",
        "alembic": "logging.trackers: mlflow",
    }
