"""The commands' rich console: external text is shown, never interpreted."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich import console
from rich.segment import Segment
from rich.text import Text

from toolkit.errors import Problem
from toolkit.text.terminal import printable


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


def problem_list(title: str, problems: Sequence[Problem]) -> Text:
    """Mistakes in a recipe, a block each: where, what was found, what is allowed, the fix.

    Lines are not wrapped, so that a terminal finds `file:line`.
    """
    count = len(problems)
    text = Text.assemble(("✗ ", "red"), (printable(title), "bold"))
    text.append(f"  {count} problem{'s' * (count > 1)}", "red")
    for problem in problems:
        where = f"{problem.file}:{problem.line}" if problem.line else problem.file
        text.append(f"\n  {where}{'  ' * bool(where)}", "cyan")
        text.append(problem.key, "bold")
        text.append(f"\n      found    {problem.found}")
        text.append(f"\n      allowed  {problem.allowed}")
        if problem.fix:
            text.append("\n      fix      ")
            text.append(problem.fix, "green")
    return text
