"""Malformed rows that a recipe drops: counted, reported, and too many are an error."""

import logging
from dataclasses import dataclass

from toolkit.errors import DataError
from toolkit.recipe.schema import RowsSource

logger = logging.getLogger(__name__)


@dataclass
class DroppedRows:
    """Those of one reading of a source."""

    source: RowsSource
    count: int = 0
    first: str = ""
    """Place of the first one, and what is wrong with it."""

    def add(self, said: str) -> None:
        """Record a malformed row, with its position and reason.

        Raises DataError unless such rows are dropped, and if the limit is exceeded.
        """
        source = self.source
        if source.malformed == "error":
            fix = "correct the row, or set `malformed: drop` to drop and count such rows"
            raise DataError(said, fix=fix)
        self.count += 1
        self.first = self.first or said
        if source.malformed_limit is not None and self.count > source.malformed_limit:
            raise DataError(
                f"`{source.path}`: more than {source.malformed_limit:,} rows are malformed, "
                f"the first: {self.first}",
                fix="correct the data, or raise `malformed_limit`",
            )

    def report(self) -> None:
        if self.count:
            said = "`%s`: %s malformed rows dropped (the first: %s)"
            logger.warning(said, self.source.path, f"{self.count:,}", self.first)
