"""What `dmt doctor` says of trackers."""

from tests.processes import ROOT
from toolkit.doctor.needs import needs_of
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
