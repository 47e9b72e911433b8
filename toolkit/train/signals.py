"""Graceful stop: a signal sets a flag; `StepReduction` brings it to all ranks."""

import signal
from pathlib import Path
from types import FrameType
from typing import Any

from toolkit.system.handlers import STOP_SIGNALS, handling

_INTERRUPTS_TO_FORCE = 3


class StopRequest:
    """Turns a signal of STOP_SIGNALS or a file into a flag, while entered.

    If `file` appears, this rank also requests a stop: used by launchers whose ranks are on
    other machines. It is removed when the run has stopped. The third SIGINT raises
    KeyboardInterrupt, to exit if saving hangs. It must be entered in the main thread, since
    Python delivers signals there.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._reason: str | None = None
        self._interrupts = 0
        self._handlers = handling(STOP_SIGNALS, self._remember)
        self.agreed = False
        """Whether all ranks know that the run stops after this step, without a signal."""

    @property
    def reason(self) -> str | None:
        """Name of the first signal that this rank received, e.g. `SIGTERM`, or of the file."""
        return self._reason

    def __enter__(self) -> "StopRequest":
        self._handlers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handlers.__exit__(*error)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._reason = self._reason or signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= _INTERRUPTS_TO_FORCE:
                raise KeyboardInterrupt

    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        if self._file is not None and self._file.exists():
            self._reason = self._reason or str(self._file)
            self._file.unlink(missing_ok=True)
        return self._reason is not None
