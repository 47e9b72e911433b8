"""A progress bar, on a terminal only."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def with_progress(
    items: Iterable[Item], title: str, total: int, *, show: bool
) -> Iterator[Item]:
    """The `items`, with a bar on standard error when it is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = not (show and console.is_terminal)
    yield from track(items, description=title, total=total, console=console, disable=hidden)
