"""Progress of work on data: none, or a progress bar on a terminal."""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Track(Protocol):
    """Shows, while its result is consumed, how many items are done."""

    def __call__(self, items: Iterable[Item], title: str) -> Iterator[Item]: ...


def untracked(items: Iterable[Item], title: str) -> Iterator[Item]:
    """The `items`. Shows nothing."""
    del title
    return iter(items)


def with_bar(items: Iterable[Item], title: str) -> Iterator[Item]:
    """The `items`, with a bar on standard error when it is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = not console.is_terminal
    yield from track(items, description=title, total=None, console=console, disable=hidden)
