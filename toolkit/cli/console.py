"""The commands' rich console: external text is shown, never interpreted."""

from collections.abc import Iterator
from typing import Any

from rich import console
from rich.segment import Segment
from rich.text import Text

from toolkit.terminal import printable


class Console(console.Console):
    """No markup, no highlighting, and control characters as escapes (`printable`)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Before rich drops some of them from the text."""
        return super().render_str(printable(text, lines=True), **settings)

    def render(self, *args: Any, **settings: Any) -> Iterator[Segment]:
        """Every text on its way out; rich's own control codes are marked as such."""
        for segment in super().render(*args, **settings):
            text, style, control = segment
            yield segment if control else Segment(printable(text, lines=True), style)
