"""Copies of the training state in host memory, made by a GPU while it computes on.

They are made on a stream of their own, into pinned memory. The host waits for none of them:
what changes the state next waits for them on the GPU (`wait_for_copies`), and the thread that
writes them waits on the host.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_copied: torch.cuda.Event | None = None
"""When the newest save's copies are complete; a process has one training state."""


class HostCopies:
    """Copies tensors to host memory, in one save after the other.

    The pinned buffers of the first save serve all later ones; `pin` makes them ahead of it, as
    pinning is slow. Where no more pinned memory can
    be had, a copy is pageable, and the host waits for it, as it does for tensors on the host.
    """

    def __init__(self) -> None:
        self._buffers: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        """By dtype and elements."""
        self._used: Counter[tuple[torch.dtype, int]] = Counter()
        """How many of them hold values of this save."""
        self._stream: torch.cuda.Stream | None = None
        self._refused = False
        """Pinned memory could not be had: it is not asked for again."""

    def pin(self, forms: Mapping[tuple[torch.dtype, int], int], device: int) -> None:
        """Pin the buffers of a save in any thread, before it begins: how many tensors of a
        dtype and a number of elements `device` holds."""
        torch.cuda.set_device(device)  # a new thread has device 0, as in `_wait`
        for form, count in forms.items():
            self._pin(form, count)

    def begin(self) -> None:
        """Begin a save: the copies of the one before have been written."""
        self._used.clear()

    def of(self, values: Tensor, *, temporary: bool) -> Tensor:
        """A copy of `values` [elements]; from a GPU, complete when what `end` returns is.

        Of `temporary` values, the GPU's memory is used again once they are copied.
        """
        buffer = self._buffer(values) if values.device.type == "cuda" else None
        if buffer is None:
            return values.to("cpu", copy=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        compute = torch.cuda.current_stream()
        self._stream.wait_stream(compute)  # for each tensor: this one may be computed just now
        with torch.cuda.stream(self._stream):
            buffer.copy_(values, non_blocking=True)
        if temporary:  # by what the GPU does next: otherwise all of them would be there at once
            compute.wait_stream(self._stream)
        else:
            values.record_stream(self._stream)  # the engine may be closed before
        return buffer

    def end(self) -> Callable[[], None]:
        """End a save. What is returned waits on the host, in any thread, for its copies."""
        global _copied
        if self._stream is None:
            return lambda: None
        if _copied is not None:  # another saver's, which the GPU is to wait for, too
            self._stream.wait_event(_copied)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        _copied = self._stream.record_event(event)
        return partial(_wait, _copied, torch.cuda.current_device())

    def _buffer(self, values: Tensor) -> Tensor | None:
        """Pinned memory for `values` that this save has not used; None where there is none."""
        form = values.dtype, values.numel()
        self._pin(form, self._used[form] + 1)
        buffers = self._buffers[form]
        if self._used[form] == len(buffers):
            return None
        self._used[form] += 1
        return buffers[self._used[form] - 1]

    def _pin(self, form: tuple[torch.dtype, int], count: int) -> None:
        """Have `count` buffers of this dtype and these elements, if there is room."""
        numel, buffers = form[1], self._buffers[form]
        while len(buffers) < count and not self._refused:
            try:
                buffers.append(torch.empty(numel, dtype=form[0], pin_memory=True))
            except RuntimeError as error:
                self._refused = True
                held = sum(one.nbytes for some in self._buffers.values() for one in some)
                logger.warning(
                    "after %.1f GiB there is no more pinned memory; training waits while the "
                    "rest of a checkpoint is copied to pageable memory: %s",
                    held / 2**30,
                    error,
                )


def wait_for_copies() -> None:
    """Let the GPU make the copies of the newest save before what it is asked to do next.

    An engine calls it before each change of what `Engine.state` holds. The host does not wait.
    """
    if _copied is not None:
        torch.cuda.current_stream().wait_event(_copied)


def _wait(copied: torch.cuda.Event, device: int) -> None:
    torch.cuda.set_device(device)  # a new thread has device 0, on which it would open a context
    copied.synchronize()
