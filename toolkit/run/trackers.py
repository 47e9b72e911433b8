"""The trackers that a recipe can turn on: a row each, and what `accelerate.tracking` is given.

Imports none of their packages: `dmt doctor` reads the table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.recipe.schema import LoggingSection

Settings = Mapping[str, Any]
"""The tracker's section of the recipe; empty where it has none."""


@dataclass(frozen=True)
class Tracker:
    """One tracker of `accelerate.tracking`, by its name there."""

    title: str
    """The tracker's name in messages."""
    packages: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Distributions that it needs and DMT itself does not: module, and when, if not always."""
    not_inherited: tuple[str, ...] = ()
    """Environment variables of another run around this one; the recipe decides these."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in rank 0: no reports to the tracker's maker, fewer messages."""


TRACKERS = {
    "wandb": Tracker(
        "W&B",
        not_inherited=(
            *("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR", "WANDB_MODE"),
        ),
        environment={"WANDB_ERROR_REPORTING": "false"},
    ),
    "tensorboard": Tracker("TensorBoard", {"tensorboard": ("tensorboard", "")}),
    "mlflow": Tracker(
        "MLflow",
        {
            "mlflow-skinny": ("mlflow", ""),
            "sqlalchemy": ("sqlalchemy", "with a database of its own"),
            "alembic": ("alembic", "with a database of its own"),
        },
        not_inherited=(
            *("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"),
            *("MLFLOW_TAGS", "MLFLOW_NESTED_RUN"),
        ),
        environment={"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"},
    ),
    "trackio": Tracker("trackio", {"trackio": ("trackio", "")}),
}
"""By the name of their setting in `logging`."""


def wanted(logging: LoggingSection) -> Iterator[tuple[str, Settings]]:
    """The trackers that a recipe turns on, with their settings."""
    for name in TRACKERS:
        section = getattr(logging, name)
        settings = {} if isinstance(section, bool) or section is None else section.model_dump()
        if section and settings.get("mode") != "disabled":
            yield name, settings
