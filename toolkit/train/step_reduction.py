"""A step's one reduction over all ranks: whether to stop, because a signal has set the flag of
a rank, and what the next step divides by."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

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


class StepReduction:
    """The stop flag of any rank, and sums of numbers of all ranks.

    Every rank calls `begin` before a step and `finish` after it: the reduction overlaps with
    the step, so its latency is hidden.
    """

    def __init__(self, stop: StopRequest, group: "dist.ProcessGroup | None" = None) -> None:
        """`group`: of all ranks, for tensors in host memory. None: the default one."""
        self._stop = stop
        self._group = group
        self._numbers: tuple[float, ...] = ()
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def begin(self, *numbers: float) -> None:
        """Start the reduction of this rank's flag and numbers."""
        self._numbers = numbers
        if dist.is_initialized() and dist.get_world_size() > 1:
            flag_and_numbers = [self._stop.stop_requested, *numbers]
            sums = torch.tensor(flag_and_numbers, dtype=torch.float64)
            work = dist.all_reduce(sums, group=self._group, async_op=True)
            assert work is not None
            self._pending = (sums, work)

    def finish(self) -> tuple[bool, tuple[float, ...]]:
        """Whether to stop, and the sum of each number. The same on every rank.

        With several ranks, a signal that arrives during a step takes effect after the next one.
        """
        if self._pending is None:
            return self._stop.stop_requested or self._stop.agreed, self._numbers
        sums, work = self._pending
        work.wait()
        self._pending = None
        stopping, *totals = sums.tolist()
        return stopping > 0 or self._stop.agreed, tuple(totals)
