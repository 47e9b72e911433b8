"""The trackers that a recipe can turn on: a row each, and what `accelerate.tracking` is given.

Imports none of their packages: `dmt doctor` reads the table.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from toolkit.recipe.schema import LoggingSection


@dataclass(frozen=True)
class Tracker:
    """One tracker of `accelerate.tracking`, by its name there."""

    title: str
    """The tracker's name in messages."""
    packages: tuple[str, ...] = ()
    """Distributions that it needs and DMT itself does not."""
    not_inherited: tuple[str, ...] = ()
    """Environment variables of another run around this one, which say nothing of this one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in rank 0: no reports to the tracker's maker, fewer messages."""


TRACKERS = {
    "wandb": Tracker(
        "W&B",
        not_inherited=("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR"),
        environment={"WANDB_ERROR_REPORTING": "false"},
    ),
    "tensorboard": Tracker("TensorBoard", ("tensorboard",)),
    "mlflow": Tracker(
        "MLflow",
        ("mlflow-skinny", "sqlalchemy", "alembic"),
        not_inherited=(
            *("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"),
            *("MLFLOW_TAGS", "MLFLOW_NESTED_RUN"),
        ),
        environment={"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"},
    ),
    "trackio": Tracker("trackio", ("trackio",)),
}
"""Every tracker by its name in `logging.trackers`."""


def wandb_mode() -> str:
    """The environment's WANDB_MODE: `online` posts to W&B's server, `offline`, the default,
    writes `wandb/` in the run directory, `disabled` is as if the recipe had no W&B."""
    return os.environ.get("WANDB_MODE") or "offline"


def wanted(logging: LoggingSection) -> Iterator[str]:
    """The names of the trackers that a recipe turns on."""
    for name in TRACKERS:
        if name in logging.trackers and (name, wandb_mode()) != ("wandb", "disabled"):
            yield name


def trackers_line(logging: LoggingSection) -> str:
    """The trackers of a run in its announcement. Empty without any."""
    mode = {"wandb": f" ({wandb_mode()})"}
    titles = [TRACKERS[name].title + mode.get(name, "") for name in wanted(logging)]
    return f"logging to {', '.join(titles)}, project {logging.project}" if titles else ""
