"""Prints external text (recipes, file names, checkpoints, hub configs) safely on a terminal.

Whatever DMT prints for people goes through `tell` or through `toolkit.cli.output.Console`: no
character reaches the terminal that would move its cursor, colour or reorder what stands there.
Machine output (`--json`) is escaped by JSON itself.
"""

import os
import sys
from contextlib import suppress
from typing import IO, Any

from toolkit.text.redact import redact


def printable(text: str, *, lines: bool = False) -> str:
    r"""`text` with every character that is not printable as its Python escape.

    That is control characters (C0, DEL, C1), invisible ones (marks of writing direction,
    zero-width joiners), line separators and lone surrogates: `\x1b[31m`, `\u202e`, `\n`.
    `lines` keeps line feeds and tabs, for text of several lines.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def tell(message: str, file: IO[str] | None = None) -> None:
    """Print lines for people, by default on standard error: secrets masked, escaped."""
    print(printable(redact(message), lines=True), file=file or sys.stderr, flush=True)


class LossyStream:
    """A text stream whose reader may go away and whose disk may fill: what cannot be written is
    dropped. Everything else is the wrapped stream's."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        # What is buffered would fail again at every flush and at the process's end. Later
        # lines, of C libraries and child processes too, go where nothing fails.
        with suppress(OSError):
            _discard(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive_lost_output() -> None:
    """From now on, standard output and error that cannot be written are no failure.

    For commands that outlive their terminal: `dmt launch … 2>&1 | head`, a killed `tee`, a full
    log disk.
    """
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if stream is None:  # closed before the start: the next opened file would take its place
            _discard(number)
            stream = os.fdopen(number, "w", closefd=False)
        if not isinstance(stream, LossyStream):
            setattr(sys, name, LossyStream(stream))


def _discard(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
