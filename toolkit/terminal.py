"""Prints external text (recipes, file names, checkpoints, hub configs) safely on a terminal.

Whatever DMT prints for people goes through `tell` or through `toolkit.cli.console.Console`: no
character reaches the terminal that would move its cursor, colour or reorder what stands there.
Machine output (`--json`) is escaped by JSON itself.
"""

import sys
from typing import IO

from toolkit.redact import redact


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
