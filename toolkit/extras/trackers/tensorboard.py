"""TensorBoard event files in RUN/tensorboard: numbers only, no recipe, no environment."""

from collections.abc import Mapping
from typing import ClassVar

from toolkit.track.trackers.base import Rows, TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Event files, written without torch."""

    title = "TensorBoard"
    extra = "tensorboard"
    packages: ClassVar[Mapping[str, tuple[str, str]]] = {"tensorboard": ("tensorboard", "")}

    def start(self, run: TrackedRun) -> Mapping[str, int]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.summary import Writer

        folder = run.directory.tensorboard
        folder.mkdir(exist_ok=True)
        stored = EventAccumulator(str(folder), size_guidance={"tensors": 1}).Reload()
        # With room for one value, the newest is the one that is kept.
        newest = {tag: stored.Tensors(tag)[-1].step for tag in stored.Tags()["tensors"]}
        self._writer = Writer(str(folder))
        return newest

    def spelled(self, name: str) -> str:
        return name if "/" in name else f"train/{name}"

    def log(self, rows: Rows) -> None:
        for step, row in rows.items():
            for name, value in row.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, exit_code: int) -> None:  # noqa: ARG002 - it has no place for it
        self._writer.close()
