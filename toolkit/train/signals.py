"""Graceful stop: signals set a flag, and all ranks act on it at the same step."""

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from toolkit.handlers import STOP_SIGNALS, handling

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_INTERRUPTS_TO_FORCE = 3


class StopRequest:
    """Turns a signal of STOP_SIGNALS or a file into a flag that the loop checks once per step.

        with StopRequest() as stop:
            for step in …:
                stop.ask()
                …
                if stop.agreed()[0]:
                    save and leave

    If `file` appears, this rank also requests a stop: used by launchers whose ranks are on
    other machines. It is removed when the run has stopped. The third SIGINT raises
    KeyboardInterrupt, to exit if saving hangs. It must be entered in the main thread, since
    Python delivers signals there.
    """

    def __init__(
        self, file: Path | None = None, group: "dist.ProcessGroup | None" = None
    ) -> None:
        """`group`: of all ranks, for tensors in host memory; None: the default one."""
        self._file = file
        self._group = group
        self._reason: str | None = None
        self._interrupts = 0
        self._numbers: tuple[float, ...] = ()
        self._handlers = handling(STOP_SIGNALS, self._remember)
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

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

    def ask(self, *numbers: float) -> None:
        """Start a step's single reduction: the stop flag, and the sum of each number.

        Every rank calls it before a step and `agreed` after it: the reduction overlaps with the
        step, so its latency is hidden.
        """
        import torch
        import torch.distributed as dist

        self._numbers = numbers
        if dist.is_initialized() and dist.get_world_size() > 1:
            sums = torch.tensor([self._asked(), *numbers], dtype=torch.float64)
            work = dist.all_reduce(sums, group=self._group, async_op=True)
            assert work is not None
            self._pending = (sums, work)

    def agreed(self) -> tuple[bool, tuple[float, ...]]:
        """Whether to stop, and the sums over the numbers of all ranks; the same on every rank.

        With several ranks, a signal that arrives during a step takes effect after the next one.
        """
        if self._pending is None:
            return self._asked(), self._numbers
        sums, work = self._pending
        work.wait()
        self._pending = None
        asking, *totals = sums.tolist()
        return asking > 0, tuple(totals)

    def _asked(self) -> bool:
        if self._file is not None and self._file.exists():
            self._reason = self._reason or str(self._file)
            self._file.unlink(missing_ok=True)
        return self._reason is not None
