"""Processes on each machine that tokenise chunks before training needs them.

`AheadWorkers` is the run's side. Each process (`python -m toolkit.data.streaming.ahead`) reads
pickled data from its standard input, first the sources and then lists of chunks, of which only
the newest is used, and prints a line for each retried read. It shares only the cache with the
run: a killed process is replaced, and meanwhile the ranks tokenise what they need. It exits
when its input closes or its parent exits.
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import IO, Self, TypeAlias

from toolkit.data.remote.store import RETRIES
from toolkit.data.streaming.source import ChunkedSource
from toolkit.errors import DataError, DmtError
from toolkit.system.interpreter import python

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_NICENESS = 10
"""Low priority: the ranks come first."""
_END_S = 10.0

Wanted: TypeAlias = list[tuple[int, int]]
"""Source and number of chunks, the most urgent first."""


class AheadWorkers:
    """Tokenising processes; a context manager."""

    def __init__(
        self,
        sources: Sequence[ChunkedSource | None],
        workers: int,
        upcoming: Callable[[], Wanted],
    ) -> None:
        """`upcoming` returns the wanted chunks; it is called in a separate thread."""
        self._sources, self._workers, self._upcoming = sources, workers, upcoming
        self._asked, self._closing = threading.Event(), False
        self._processes: list[subprocess.Popen[bytes]] = []
        # It also waits for a process that does not read: training never does.
        self._thread = threading.Thread(target=self._serve, name="tokenising", daemon=True)

    def __enter__(self) -> Self:
        self.want()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing = True
        self._asked.set()
        for process in self._processes:
            process.kill()  # what it is writing is not in the cache yet
        self._thread.join(_END_S)
        for process in self._processes:
            _end(process)

    def want(self) -> None:
        """Notify the processes of training progress, without blocking."""
        self._asked.set()

    def _serve(self) -> None:
        while not self._closing:
            self._asked.wait()
            self._asked.clear()
            try:
                wanted = pickle.dumps(self._upcoming())
                for number in range(self._workers):
                    self._send(number, wanted)
            except (OSError, DataError) as error:
                logger.warning("tokenising ahead: %s", error)

    def _send(self, number: int, wanted: bytes) -> None:
        if number == len(self._processes):
            self._processes.append(self._start())
        if self._processes[number].poll() is not None and not self._closing:
            logger.warning("a tokenising process has ended and is started again")
            _end(self._processes[number])
            self._processes[number] = self._start()
        _write(self._processes[number].stdin, wanted)

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [*python(), "-m", "toolkit.data.streaming.ahead"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=_count_retries, args=(process.stdout,), daemon=True).start()
        _write(process.stdin, pickle.dumps(self._sources))
        return process


def _count_retries(said: IO[bytes]) -> None:
    """Count the failed reads of a process as those of the run, until it ends."""
    with said:
        for line in said:
            RETRIES.add(line.decode(errors="replace").rstrip())


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # of what it has not read
        process.stdin.close()


def _write(pipe: IO[bytes] | None, message: bytes) -> None:
    """Send a message; a process that has ended is found out the next time."""
    assert pipe is not None
    with suppress(BrokenPipeError):
        pipe.write(message)
        pipe.flush()


def _receive(inbox: "SimpleQueue[Wanted]") -> None:
    """Receive lists from the run; exit with it."""
    try:
        while True:
            inbox.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    """Exit when `parent` is gone: another child of it may hold the pipe open."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(0)


def main() -> None:
    """Tokenise what the run needs next, until it ends."""
    parent = os.getppid()
    for meant_for_the_run in (signal.SIGINT, signal.SIGTERM):  # which may yet save
        signal.signal(meant_for_the_run, signal.SIG_IGN)
    os.nice(_NICENESS)
    RETRIES.told = partial(print, flush=True)
    sources: list[ChunkedSource | None] = pickle.load(sys.stdin.buffer)
    inbox, failed = SimpleQueue[Wanted](), set[tuple[int, int]]()
    threading.Thread(target=_receive, args=(inbox,), daemon=True).start()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        for number, chunk in inbox.get():
            if not inbox.empty():  # only the newest list counts
                break
            source = sources[number]
            assert source is not None, "streamed"
            try:
                if (number, chunk) not in failed:
                    source.tokenise_ahead(chunk)
            except (DmtError, OSError):  # the rank that needs it reports it
                failed.add((number, chunk))


if __name__ == "__main__":
    main()
