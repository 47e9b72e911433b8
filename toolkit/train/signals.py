"""Stopping a run in good order: signals set a flag, and all ranks act on the same step."""

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from toolkit.handlers import handling

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_INTERRUPTS_TO_FORCE = 3


class StopRequest:
    """Turns SIGTERM, SIGINT, SIGUSR1 or a file into a flag that the loop asks for once a step.

        with StopRequest() as stop:
            for step in …:
                …
                if stop.agreed():
                    save and leave

    Where `file` appears, this rank asks to stop, too: the way of a launcher whose ranks are on
    other machines. It is removed when the run has stopped.
    The third SIGINT raises KeyboardInterrupt: the way out when saving does not end.
    Creating one is collective when there are several ranks (it makes a gloo group); it
    must be entered in the main thread, since Python delivers signals there.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._reason: str | None = None
        self._interrupts = 0
        self._handlers = handling(STOP_SIGNALS, self._remember)
        self._group = _gloo_group()
        self._pending: tuple[torch.Tensor, Work] | None = None

    @property
    def reason(self) -> str | None:
        """Name of the first signal that this rank got, e.g. `SIGTERM`, or of the file."""
        return self._reason

    def __enter__(self) -> "StopRequest":
        self._handlers.__enter__()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handlers.__exit__(error_type, error, traceback)
        # After an error the other ranks may never join the reduction: do not wait then.
        if error_type is None and self._pending is not None:
            self._pending[1].wait()
        self._pending = None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._reason = self._reason or signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= _INTERRUPTS_TO_FORCE:
                raise KeyboardInterrupt

    def agreed(self) -> bool:
        """Say whether to stop now; every rank calls it once per step, all get one answer.

        With several ranks the answer is about the flags at the *previous* call: that
        reduction ran while the step did, so asking costs no latency, and a signal takes
        effect one step later.
        """
        if self._group is None:
            return self._asked()
        answer = self._finish_pending()
        if not answer:
            self._start_reduction(self._group)
        return answer

    def _asked(self) -> bool:
        if self._file is not None and self._file.exists():
            self._reason = self._reason or str(self._file)
            self._file.unlink(missing_ok=True)
        return self._reason is not None

    def _finish_pending(self) -> bool:
        if self._pending is None:
            return False
        flag, work = self._pending
        work.wait()
        self._pending = None
        return bool(flag.item())

    def _start_reduction(self, group: "ProcessGroup") -> None:
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(self._asked())], dtype=torch.int32)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        self._pending = (flag, work)


def _gloo_group() -> "ProcessGroup | None":
    """Return an own gloo group of all ranks; None for a single process."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group: ProcessGroup = dist.new_group(backend="gloo")
    return group
