"""TensorBoard event files of a run, for those who asked for them in the recipe."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import BackendUnavailable
from toolkit.track.metrics import Metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLog:
    """Writes numbers only: no host parameters, no recipe, no environment."""

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        """Open `folder` for writing; TensorBoard hides older points after `resume_step`.

        Raises BackendUnavailable when the tensorboard package is missing.
        """
        self._writer = _summary_writer(folder, resume_step)

    def write(self, metrics: Metrics) -> None:
        """Add every number of `metrics` at its step."""
        for name, value in metrics.record().items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"train/{name}", value, metrics.step)

    def write_validation(self, step: int, found: Mapping[str, float]) -> None:
        """Add the validation loss and metrics after `step` steps."""
        for name, value in found.items():
            self._writer.add_scalar(f"validation/{name}", value, step)

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()


def _summary_writer(folder: Path, resume_step: int) -> "SummaryWriter":
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise BackendUnavailable(
            f"logging.tensorboard is on, but tensorboard cannot be imported ({error})",
            fix="pip install 'dmt[tensorboard]', or set logging.tensorboard: false",
        ) from error
    # purge_step hides the points that a resumed run writes again.
    writer: SummaryWriter = module.SummaryWriter(
        str(folder), purge_step=resume_step + 1 if resume_step else None
    )
    return writer
