"""The signals that ask a run to stop, and handlers for a while."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
)
"""Save, then exit. SIGHUP: the terminal or ssh connection is gone; SIGQUIT: Ctrl-\\; SIGUSR1:
Slurm, ahead of a time limit (`--signal=USR1@120`)."""

STACKS_SIGNAL = signal.SIGUSR2
"""On this signal, a training rank writes the stacks of all its threads to its log and
continues."""


@contextmanager
def handling(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """While entered, `handler` gets these signals, and afterwards the earlier handlers again.
    Main thread only.

    A SIGHUP that is ignored stays so: the process was started by `nohup`.
    """
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    previous = {
        number: signal.signal(number, handler) for number in numbers if number not in ignored
    }
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
