"""Logging of a worker: everything in its own file, rank 0's warnings on the console."""

import logging
import sys

from toolkit.run.directory import RunDirectory
from toolkit.text.redact import redact
from toolkit.text.terminal import printable

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _RedactingFormatter(logging.Formatter):
    """Masks secrets and control characters in the finished text, traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(super().format(record)), lines=True)


class _Once(logging.Filter):
    """Lets each message through once, however often a library repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = (record.name, record.getMessage())
        if message in self._seen:
            return False
        self._seen.add(message)
        return True


def setup_rank_logging(run: RunDirectory, rank: int) -> list[logging.Handler]:
    """Send the root logger (INFO) to `logs/rank-N.log`, through redaction.

    Rank 0 also shows warnings on standard error, each once. Returns the handlers that
    were added, so that they can be removed again.
    """
    run.logs.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(run.rank_log(rank), encoding="utf-8")
    file.setFormatter(_RedactingFormatter(_FORMAT))
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        console = logging.StreamHandler(sys.stderr)
        console.setLevel(logging.WARNING)
        console.setFormatter(_RedactingFormatter("%(levelname)s: %(message)s"))
        console.addFilter(_Once())
        handlers.append(console)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    return handlers
