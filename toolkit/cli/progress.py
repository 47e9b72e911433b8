"""Progress of a command's long work."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from toolkit.cli.output import Console
from toolkit.system.handlers import handling


@contextmanager
def progress(what: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Show how much of `total` is done, on standard error if that is a terminal.

    Call the result with the number of bytes done, or with arguments of rich's
    `Progress.update`. SIGTERM cleans up as Ctrl-C does.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
    )

    console = Console(stderr=True)
    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(24), count)
    bar = Progress(*columns, console=console, transient=True)
    shown = bar if console.is_terminal else nullcontext()
    with handling([signal.SIGTERM], signal.default_int_handler), shown:
        yield partial(bar.advance if in_bytes else bar.update, bar.add_task(what, total=total))
