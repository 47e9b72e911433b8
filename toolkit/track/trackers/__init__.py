"""Trackers for a run's metrics: one file and one line here per tracker.

A tracker runs in a separate process (`track/follower.py`) and is called only there; none of
these files imports its package before `start`.
"""

from collections.abc import Iterator

from toolkit.errors import BackendUnavailable
from toolkit.recipe.schema import LoggingSection
from toolkit.registry import Registry
from toolkit.system.install import source
from toolkit.track.trackers.base import Settings, Tracker

_OWN = {
    "wandb": "toolkit.track.trackers.wandb:WandbTracker",
    "tensorboard": "toolkit.extras.trackers.tensorboard:TensorBoardTracker",
    "mlflow": "toolkit.extras.trackers.mlflow:MlflowTracker",
    "trackio": "toolkit.extras.trackers.trackio:TrackioTracker",
}
TRACKERS: Registry[type[Tracker]] = Registry("dmt.trackers", _OWN)
"""By the name of their setting in `logging`."""


def wanted(logging: LoggingSection) -> Iterator[tuple[str, Settings]]:
    """The trackers that a recipe turns on, with their settings.

    Raises BackendUnavailable for one that this installation has left out.
    """
    for name in _OWN:
        section = getattr(logging, name)
        settings = {} if isinstance(section, bool) or section is None else section.model_dump()
        if section and settings.get("mode") != "disabled":
            if name not in TRACKERS.names:
                raise BackendUnavailable(
                    f"logging.{name}: this installation of DMT has no toolkit/extras",
                    fix=f"install all of it: pip install {source()}",
                )
            yield name, settings
