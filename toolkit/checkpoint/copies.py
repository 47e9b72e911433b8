"""Copies of the training state in host memory.

A GPU makes them in order with everything else that it computes, into pinned memory: the host
waits for none of them, and a later step cannot change what is still being copied.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class HostCopies:
    """Copies tensors to host memory, in one save after the other.

    The pinned buffers of the first save serve all later ones. Without room for more of them, a
    copy is pageable, and the host waits for it.
    """

    def __init__(self) -> None:
        self._buffers: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        """By dtype and number of elements."""
        self._used: Counter[tuple[torch.dtype, int]] = Counter()
        """How many of them hold values of this save."""
        self._full = False
        """Pinning failed: it is not tried again."""

    def begin(self) -> None:
        """Begin a save: the copies of the one before have been written."""
        self._used.clear()

    def of(self, values: Tensor) -> Tensor:
        """A copy of `values` [elements]; from a GPU, complete when what `end` returns is."""
        buffer = self._buffer(values) if values.device.type == "cuda" else None
        if buffer is None:
            return values.to("cpu", copy=True)
        return buffer.copy_(values, non_blocking=True)

    def end(self) -> Callable[[], None]:
        """End a save. What is returned waits for its copies, on the host and in any thread."""
        if not self._used:
            return lambda: None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().record_event(event)
        return partial(_wait, event, torch.cuda.current_device())

    def _buffer(self, values: Tensor) -> Tensor | None:
        """Pinned memory for `values` that this save has not used; None without room."""
        form = values.dtype, values.numel()
        buffers = self._buffers[form]
        if self._used[form] == len(buffers) and not self._full:
            try:
                buffers.append(torch.empty(form[1], dtype=form[0], pin_memory=True))
            except RuntimeError as error:
                self._full = True
                logger.warning(
                    "there is no more pinned memory; training waits while the rest of a "
                    "checkpoint is copied to pageable memory: %s",
                    error,
                )
        if self._used[form] == len(buffers):
            return None
        self._used[form] += 1
        return buffers[self._used[form] - 1]


def _wait(event: torch.cuda.Event, device: int) -> None:
    torch.cuda.set_device(device)  # a new thread has device 0, on which it would open a context
    event.synchronize()
