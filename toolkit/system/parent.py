"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, number: signal.Signals) -> bool:
    """Let the kernel send `number` to this process when the thread that started it ends.

    False if `parent`, the process that started it, has ended before.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return os.getppid() == parent
