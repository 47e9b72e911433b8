"""The interface of a tracker."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toolkit.run.directory import RunDirectory

Settings = Mapping[str, Any]
"""The tracker's section of the recipe; empty where it has none."""
Rows = Mapping[int, Mapping[str, float]]
"""Step → name → value, in the order of steps; NaN and infinity included."""


class GaveUp(Exception):
    """The tracker cannot be used; the text is for the user."""


@dataclass(frozen=True)
class TrackedRun:
    """A tracker's view of a run, without secrets."""

    directory: RunDirectory
    name: str
    run_id: str
    """The same in every start of the run."""
    config: Mapping[str, Any]
    """`recipe` and `plan`, as far as the run directory has them."""
    settings: Settings


class Tracker(ABC):
    """Posts one run. An exception of any method stops the tracker, but not the run."""

    title: ClassVar[str]
    """Its name in messages."""
    extra: ClassVar[str] = ""
    """The optional part of DMT that installs its package; empty for one of DMT's own needs."""
    packages: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Distributions that it needs and DMT itself does not: module, and when, if not always."""
    not_inherited: ClassVar[tuple[str, ...]] = ()
    """Environment variables of another run around this one; the recipe decides these."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Set for its process: no reports to the tracker's maker."""

    @abstractmethod
    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        """Start, or continue, the run with this id.

        Returns the newest stored step of every name, as spelled here, so that nothing is posted
        twice; None if the store cannot be queried: then the follower records what it has
        posted.
        """

    def spelled(self, name: str) -> str:
        """A name of DMT's (`loss`, `validation/SOURCE`) as this tracker's rows have it."""
        return name

    @abstractmethod
    def log(self, rows: Rows) -> None:
        """Store these numbers; if the store can be queried, they are stored when this
        returns."""

    def summarize(self, numbers: Mapping[str, object]) -> None:  # noqa: B027 - optional
        """Note what was predicted for the whole run, and measured; may come again."""

    @abstractmethod
    def finish(self, exit_code: int) -> None:
        """Flush buffered values, and report how the run ended."""

    @staticmethod
    def afterwards(run: RunDirectory, settings: Settings) -> str | None:  # noqa: ARG004
        """What the user may do with the run now, in one line."""
        return None
