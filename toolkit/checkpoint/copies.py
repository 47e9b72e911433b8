"""Copies of the training state in host memory.

A GPU makes the copies in pinned memory, in order with its other work. So the host need not
wait, and a later step cannot change what is still being copied. torch keeps freed pinned memory
for the next save.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class HostCopies:
    """Copies tensors to host memory. Without room for more pinned memory, a copy is pageable,
    and the host waits for it."""

    def __init__(self) -> None:
        self._full = False
        """Whether pinning failed, after which it is not tried again."""
        self._copying = False
        """A GPU copies since the last `end`."""

    def of(self, values: Tensor) -> Tensor:
        """A copy of `values` [elements] in host memory. A copy from a GPU may still be running.
        Call the function that `end` returns to wait for it."""
        if values.device.type != "cuda" or self._full:
            return values.to("cpu", copy=True)
        try:
            pinned = torch.empty(values.numel(), dtype=values.dtype, pin_memory=True)
        except RuntimeError as error:
            self._full = True
            logger.warning(
                "there is no more pinned memory; training waits while the rest of a "
                "checkpoint is copied to pageable memory: %s",
                error,
            )
            return self.of(values)
        self._copying = True
        return pinned.copy_(values, non_blocking=True)

    def end(self) -> Callable[[], None]:
        """End a save. Returns a function that waits, on the host and in any thread, for its
        copies."""
        if not self._copying:
            return lambda: None
        self._copying = False
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().record_event(event)
        return partial(_wait, event, torch.cuda.current_device())


def _wait(event: torch.cuda.Event, device: int) -> None:
    torch.cuda.set_device(device)  # a new thread has device 0, on which it would open a context
    event.synchronize()
