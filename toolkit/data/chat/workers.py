"""Makes samples of chats in several processes: a template is Python, which uses one core."""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from toolkit.data.chat.maker import Batch, SampleBatch, SampleMaker
from toolkit.errors import DataError

ALONE = 4
"""Batches that this process renders before it starts others, which takes them 2 s."""


def made_in_order(make: SampleMaker, batches: Iterator[Batch]) -> Iterator[SampleBatch]:
    """Apply `make` to the batches, in order: to the first ones here, to the others in one
    process per core. Raises the DataError of the first batch that has one."""
    count = len(os.sched_getaffinity(0))
    yield from map(make, islice(batches, ALONE if count > 1 else None))
    if (following := next(batches, None)) is not None:
        yield from _made_by_processes(make, chain([following], batches), count)


def _made_by_processes(
    make: SampleMaker, batches: Iterator[Batch], count: int
) -> Iterator[SampleBatch]:
    """The processes take turns, and each has one batch at a time."""
    with ExitStack() as running:
        idle = [running.enter_context(_process()) for _ in range(count)]
        for connection in idle:
            _send(connection, make)
        busy = deque[Connection]()
        for batch in batches:
            if idle:
                connection = idle.pop()
                _send(connection, batch)
            else:
                connection = busy.popleft()
                made = _answer(connection)
                _send(connection, batch)
                yield made
            busy.append(connection)
        yield from map(_answer, busy)


@contextmanager
def _process() -> Iterator[Connection]:
    """The connection to a process, which ends when this end of it is closed."""
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
    try:
        yield ours
    finally:
        process.kill()
        process.wait()


@contextmanager
def _connected() -> Iterator[None]:
    """Raise DataError if the process at the other end of a connection ends."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise DataError(
            "a process that renders chats has ended",
            fix="see what it printed; if it was killed for want of memory, take another "
            "machine for `dmt data prepare`",
        ) from error


def _send(connection: Connection, what: SampleMaker | Batch) -> None:
    with _connected():
        connection.send(what)


def _answer(connection: Connection) -> SampleBatch:
    with _connected():
        answer: SampleBatch | DataError = connection.recv()
    if isinstance(answer, DataError):
        raise answer
    return answer


def _serve(connection: Connection) -> None:
    """Answer each batch with its samples, or with the error that ends the preparation."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    with suppress(EOFError, ConnectionError):
        make: SampleMaker = connection.recv()
        while True:
            batch = connection.recv()
            try:
                connection.send(make(batch))
            except DataError as error:
                connection.send(error)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
