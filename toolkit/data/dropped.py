"""Malformed rows of chats and preferences that a recipe drops, counted."""

from dataclasses import dataclass

from toolkit.errors import DataError
from toolkit.recipe.schema import ChatRowsSource


@dataclass
class DroppedRows:
    """Those of one reading of a source."""

    source: ChatRowsSource
    count: int = 0
    first: str = ""
    """Place of the first one, and what is wrong with it."""

    def add(self, said: str) -> None:
        """Record a malformed row, with its position and reason.

        Raises DataError unless such rows are dropped.
        """
        if self.source.malformed == "error":
            fix = "correct the row, or set `malformed: drop` to drop and count such rows"
            raise DataError(said, fix=fix)
        self.count += 1
        self.first = self.first or said
