"""Graceful stop: a signal sets a flag. `StepReduction` brings it to all ranks."""

import signal
from types import FrameType

from toolkit.launchers.process import StopSignals


class StopRequest(StopSignals):
    """Turns a signal of STOP_SIGNALS into a flag, while entered.

    The third SIGINT raises KeyboardInterrupt, to exit if saving hangs. It must be entered in
    the main thread, since Python delivers signals there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        """Name of the first signal that this rank received, e.g. `SIGTERM`."""
        self.agreed = False
        """Whether all ranks know that the run stops after this step, without a signal."""

    def _remember(self, number: int, frame: FrameType | None) -> None:
        super()._remember(number, frame)
        self.reason = self.reason or signal.Signals(number).name
        if number == signal.SIGINT and self.kill_requested:
            raise KeyboardInterrupt
