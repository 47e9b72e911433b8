"""Trackers for a run's metrics: one file and one line here per tracker.

A tracker runs in a separate process (`track/follower.py`) and is called only there; none of
these files imports its package before `start`.
"""

from collections.abc import Iterator

from toolkit.recipe.schema import LoggingSection
from toolkit.track.trackers.base import Settings, Tracker
from toolkit.track.trackers.mlflow import MlflowTracker
from toolkit.track.trackers.tensorboard import TensorBoardTracker
from toolkit.track.trackers.trackio import TrackioTracker
from toolkit.track.trackers.wandb import WandbTracker

TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""By the name of their setting in `logging`."""


def wanted(logging: LoggingSection) -> Iterator[tuple[str, Settings]]:
    """The trackers that a recipe turns on, with their settings."""
    for name in TRACKERS:
        section = getattr(logging, name)
        settings = {} if isinstance(section, bool) or section is None else section.model_dump()
        if section and settings.get("mode") != "disabled":
            yield name, settings
