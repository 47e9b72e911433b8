"""One run per directory: rank 0 holds a lock on RUN/lock while it runs.

Two runs in one directory would write each step twice and delete each other's half-written
checkpoints. The lock is the kernel's (flock): it is released however its holder ends, so there
is nothing to clean up. The file's text only describes the holder.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from toolkit.errors import DirectoryInUse
from toolkit.run.directory import RunDirectory, not_writable
from toolkit.system.untrusted import read_json
from toolkit.text.terminal import tell

_RETRY_S = 0.1
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
"""Errors of file systems that do not support locks."""


def claim(run: RunDirectory) -> None:
    """Lock the run directory until this process ends, however it ends.

    Raises DirectoryInUse when another process holds it, RecipeError when the lock file cannot
    be written. If the file system does not support locks, a warning is printed.
    """
    # A forked child that outlives this process must not hold the lock; its own children run
    # this hook, too, when the number may be another file's.
    held = [_lock(run)]
    os.register_at_fork(after_in_child=lambda: os.close(held.pop()) if held else None)


@contextmanager
def claimed(run: RunDirectory) -> Iterator[None]:
    """Lock the run directory for a while. Raises as `claim` does."""
    descriptor = _lock(run)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(run: RunDirectory) -> int:
    """The descriptor that holds the lock. The file names this process."""
    try:
        descriptor = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise not_writable(run.lock, error) from error
    if not _locked(descriptor, fcntl.LOCK_EX, warn=True):
        os.close(descriptor)
        raise _in_use(run)
    since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with suppress(OSError):  # On a full disk the lock is still valid.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(holder)}\n".encode(), 0)
    return descriptor


def refuse_if_claimed(run: RunDirectory, patience_s: float = 0) -> None:
    """Raise DirectoryInUse when a run still holds the directory after `patience_s` seconds.
    Writes nothing."""
    try:
        descriptor = os.open(run.lock, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        raise not_writable(run.lock, error) from error
    deadline = time.monotonic() + patience_s
    try:
        # Shared: two checks do not conflict with each other.
        while not _locked(descriptor, fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                raise _in_use(run)
            time.sleep(_RETRY_S)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int, *, warn: bool = False) -> bool:
    """Try to lock, without waiting. Also true where there are no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if warn:
            tell(
                f"warning: the run directory's file system knows no locks ({error.strerror}): "
                f"nothing keeps a second run out of it"
            )
    return True


def _in_use(run: RunDirectory) -> DirectoryInUse:
    try:
        holder = read_json(run.lock)
        pid = int(holder["pid"])
        who = f"process {pid} on {holder['host']}, since {holder['since']}"
        stop = f"stop it (on {holder['host']}: kill -TERM {pid}; it saves first)"
    except (OSError, ValueError, TypeError, KeyError):
        who, stop = "a process that has not said its name", "stop it"
    return DirectoryInUse(
        f"{run.path} belongs to a run that is still running: {who}",
        fix=f"wait for its end, {stop}, or --run-dir OTHER",
    )
