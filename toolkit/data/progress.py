"""A progress bar over documents, on a terminal only."""

from collections.abc import Iterator

from toolkit.data.sources import Documents


def document_progress(documents: Documents, title: str, *, show: bool) -> Iterator[str]:
    """The texts of `documents`, with a bar on standard error when it is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        documents,
        description=title,
        total=len(documents),
        console=console,
        disable=not (show and console.is_terminal),
    )
