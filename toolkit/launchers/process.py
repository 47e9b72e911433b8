"""Processes that do not outlive their launcher, and signals that are delivered once."""

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from toolkit.system.handlers import STACKS_SIGNAL, STOP_SIGNALS, handling

FAILED_GRACE_S = 5.0
"""Grace period of the other ranks after one failed: they cannot save any more."""
ORPHAN_GRACE_S = 30.0
"""How long ranks may save after their launcher died, and Ray's agents not hear of a stop."""
STACKS_S = 0.5
"""Time that a rank has to write its stacks."""
POLL_S = 0.05
STOPPING = "stopping: saving first; press Ctrl-C twice more to kill"

_INTERRUPTS_TO_KILL = 3
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn`: the kernel sends `number` when the starting thread ends.

    The *thread*: start such a process only from one that lives as long as it should. It
    runs between fork and exec, so start it before any thread that may hold a lock.
    """
    parent = os.getpid()

    def between_fork_and_exec() -> None:
        # Other launchers do not handle this signal and would exit at once, and so would a
        # worker before it has set its handler.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it has ended before
            os._exit(1)

    return between_fork_and_exec


def show_stacks(pids: Iterable[int]) -> None:
    """Let ranks that are about to be killed, or are stopped, write their stacks. Takes
    STACKS_S."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, STACKS_SIGNAL)
            os.kill(pid, signal.SIGCONT)
    time.sleep(STACKS_S)


class StopRequested(Exception):
    """A signal came where nothing is to be saved."""


class StopSignals:
    """While entered, STOP_SIGNALS only set flags, which a loop polls."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._interrupts = 0
        self._raises = False
        self._handlers = handling(STOP_SIGNALS, self._remember)

    @property
    def kill_requested(self) -> bool:
        """True from the third SIGINT on: the user wants to exit immediately."""
        return self._interrupts >= _INTERRUPTS_TO_KILL

    def __enter__(self) -> Self:
        self._handlers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handlers.__exit__(*error)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let a request to stop, also one that came before, raise StopRequested inside."""
        self._raises = True
        try:
            if self.stop_requested:
                raise StopRequested
            yield
        finally:
            self._raises = False

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.stop_requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._raises:
            self._raises = False
            raise StopRequested


class Deadline:
    """A point in time. Never, until it is set."""

    def __init__(self) -> None:
        self._at = math.inf

    def start(self, seconds: float) -> None:
        """Set the time, unless an earlier one is set."""
        self._at = min(self._at, time.monotonic() + seconds)

    @property
    def passed(self) -> bool:
        """True if the time has passed."""
        return time.monotonic() >= self._at
