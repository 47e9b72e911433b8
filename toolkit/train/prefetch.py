"""The micro batches of coming steps, built by a thread while a step runs."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import torch

from toolkit.batch import MicroBatch


class Prefetch:
    """This rank's micro batches, step by step, each built while the step before runs.

    One thread and one step ahead: NumPy and the reading of a file release the interpreter
    while the loop waits for the device. With a GPU the batches lie in pinned memory, from
    which they are copied without waiting. A context manager: the thread ends with it.
    """

    def __init__(self, build: Callable[[int], list[MicroBatch]], step: int) -> None:
        """`build` gives the micro batches of a step; `step` is the first that is taken."""
        device: dict[str, Any] = {}
        self._pin = torch.cuda.is_available()
        if self._pin:  # a new thread has device 0, and pinning would open it
            index = torch.cuda.current_device()
            device = {"initializer": torch.cuda.set_device, "initargs": (index,)}
        self._build = build
        self._step = step
        self._thread = ThreadPoolExecutor(1, "prefetch", **device)
        self._next: Future[list[MicroBatch]] = self._thread.submit(self._built, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Not waited for: reading may hang, and who is interrupted wants to leave.
        self._thread.shutdown(wait=False, cancel_futures=True)

    def take(self) -> tuple[list[MicroBatch], float]:
        """The micro batches of the next step, and the seconds that they were waited for.

        Begins to build those of the step behind. Raises what building them raised.
        """
        started = time.perf_counter()
        batches = self._next.result()
        waited_s = time.perf_counter() - started
        self._step += 1
        self._next = self._thread.submit(self._built, self._step)
        return batches, waited_s

    def _built(self, step: int) -> list[MicroBatch]:
        batches = self._build(step)
        return [batch.pinned() for batch in batches] if self._pin else batches
