"""Bounds on what a chat template may use: it is a program of others, run for every row."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_MOST_CPU_S = 30.0
"""For one row; the longest conversations take a second."""
_MOST_BYTES = 2**32
"""For one row, in addition to what the process has."""
_OWN_SIZE = Path("/proc/self/statm")


class TooCostly(Exception):
    """A row takes more time or memory than it may."""


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the CPU time, in the main thread, and on Linux the memory of the process.

    Raises TooCostly, not MalformedRow: which rows a run drops must not depend on the machine.
    """
    timed = threading.current_thread() is threading.main_thread()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, _stop) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_CPU_S)
        if before[0] == resource.RLIM_INFINITY and _OWN_SIZE.exists():
            pages = int(_OWN_SIZE.read_text().split()[0])
            most = pages * resource.getpagesize() + _MOST_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
        yield
    except MemoryError:
        raise TooCostly(f"more than {_MOST_BYTES / 2**30:g} GiB of memory") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler or signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _stop(*_: object) -> NoReturn:
    raise TooCostly(f"more than {_MOST_CPU_S:g} s of CPU time")
