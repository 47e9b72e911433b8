"""The micro batches of coming steps, built by a thread while a GPU computes."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self

import torch

from toolkit.batch import MicroBatch

_Batches = list[MicroBatch]


class Prefetch:
    """This rank's micro batches, step by step. A context manager.

    With a GPU, a thread builds them during the previous step, in pinned memory, from which they
    are copied to the device asynchronously. Without one they are built when they are taken: the
    model computes on the same cores, so a thread would not help, and on busy cores the loop
    would wait for it to be scheduled.
    """

    def __init__(self, build: Callable[[int], _Batches], step: int) -> None:
        """`build` gives the micro batches of a step. `step` is the first that is taken."""
        self._build = build
        self._step = step
        self._thread: ThreadPoolExecutor | None = None
        if torch.cuda.is_available():  # a new thread has device 0, which pinning would open
            device = torch.cuda.current_device()
            self._thread = ThreadPoolExecutor(
                1, "prefetch", initializer=torch.cuda.set_device, initargs=(device,)
            )
        self._next = self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            # Not joined: reading may hang, and an interrupted run should exit.
            self._thread.shutdown(wait=False, cancel_futures=True)

    def take(self) -> tuple[_Batches, float]:
        """The micro batches of the next step, and the seconds that the caller waited for them.

        Starts building those of the following step. Raises what building them raised.
        """
        started = time.perf_counter()
        batches = self._next()
        waited_s = time.perf_counter() - started
        self._step += 1
        self._next = self._begin()
        return batches, waited_s

    def _begin(self) -> Callable[[], _Batches]:
        """The source of the batches of the next step."""
        if self._thread is None:
            return partial(self._build, self._step)
        return self._thread.submit(self._pinned, self._step).result

    def _pinned(self, step: int) -> _Batches:
        return [batch.pinned() for batch in self._build(step)]
