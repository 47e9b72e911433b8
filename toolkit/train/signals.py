"""Graceful stop: a signal sets a flag; `StepReduction` brings it to all ranks."""

import signal
from pathlib import Path
from types import FrameType

from toolkit.launchers.process import StopSignals


class StopRequest(StopSignals):
    """Turns a signal of STOP_SIGNALS or a file into a flag, while entered.

    If `file` appears, this rank also requests a stop: used by launchers whose ranks are on
    other machines. It is removed when the run has stopped. The third SIGINT raises
    KeyboardInterrupt, to exit if saving hangs. It must be entered in the main thread, since
    Python delivers signals there.
    """

    def __init__(self, file: Path | None = None) -> None:
        super().__init__()
        self._file = file
        self._reason: str | None = None
        self.agreed = False
        """Whether all ranks know that the run stops after this step, without a signal."""

    @property
    def reason(self) -> str | None:
        """Name of the first signal that this rank received, e.g. `SIGTERM`, or of the file."""
        return self._reason

    def _remember(self, number: int, frame: FrameType | None) -> None:
        super()._remember(number, frame)
        self._reason = self._reason or signal.Signals(number).name
        if number == signal.SIGINT and self.kill_requested:
            raise KeyboardInterrupt

    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        if self._file is not None and self._file.exists():
            self._reason = self._reason or str(self._file)
            self._file.unlink(missing_ok=True)
        return self._reason is not None
