"""Fault injection: named points of the code at which a test makes a rank crash or fail.

    DMT_FAILPOINTS="checkpoint.renamed=kill@rank1,hit2;step=stop@rank0"

makes rank 1 kill itself when it passes `checkpoint.renamed` for the second time, and rank 0
stop itself at its first `step`. Without the variable a point costs one dict lookup.

Actions: `kill` (SIGKILL), `stop` (SIGSTOP), `exit` (a crash, exit code 1), `full` (the disk
is full: OSError ENOSPC), `hang` (sleep indefinitely), `raise` (RuntimeError).
"""

import errno
import os
import re
import signal
import time
from dataclasses import dataclass
from functools import cache

VARIABLE = "DMT_FAILPOINTS"
_FORM = re.compile(
    r"([\w.]+)=(kill|stop|exit|full|hang|raise)(?:@(?:rank(\d+))?,?(?:hit(\d+))?)?"
)


@dataclass
class _Fault:
    action: str
    rank: str | None
    """The rank to fail. None for every rank."""
    hit: int
    """How many times the point has still to be passed."""


def failpoint(name: str) -> None:
    """Do what the environment asks for at the point `name`. Usually nothing."""
    for fault in _faults().get(name, ()):
        if fault.rank not in (None, os.environ.get("RANK", "0")):
            continue
        fault.hit -= 1
        if fault.hit == 0:
            _act(name, fault.action)


@cache
def _faults() -> dict[str, list[_Fault]]:
    """The faults of the environment, read once. Raises ValueError for one that has no form."""
    found: dict[str, list[_Fault]] = {}
    for text in filter(None, os.environ.get(VARIABLE, "").split(";")):
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{VARIABLE}: {text!r} is not NAME=ACTION@rankN,hitM")
        name, action, rank, hit = match.groups()
        found.setdefault(name, []).append(_Fault(action, rank, int(hit or 1)))
    return found


def _act(name: str, action: str) -> None:
    if action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    elif action == "exit":
        os._exit(1)
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {name}")
    elif action == "raise":
        raise RuntimeError(f"failpoint {name}")
    while action == "hang":
        time.sleep(3600)
