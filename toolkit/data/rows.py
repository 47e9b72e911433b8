"""The interface of a data set: samples, each of one or several rows of a micro batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from toolkit.batch import IGNORE_INDEX

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One row of a micro batch: arrays [sequence], with the meaning they have in MicroBatch."""

    input_ids: Int64Array
    labels: Int64Array
    positions: Int64Array | None = None
    segments: npt.NDArray[np.int32] | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    """One number for the row under each name."""

    @classmethod
    def padding(cls, like: "Row") -> "Row":
        """A row of the same documents of which nothing is trained."""
        tokens = np.zeros_like(like.input_ids)
        labels = np.full_like(like.labels, IGNORE_INDEX)
        extra = dict.fromkeys(like.extra, 0.0)
        return replace(like, input_ids=tokens, labels=labels, extra=extra)


@dataclass(frozen=True)
class MarkedTokens:
    """Tokens of a document, and which of them are trained."""

    ids: Int64Array
    """[tokens]."""
    trained: npt.NDArray[np.bool_]
    """[tokens]."""

    def between(self, start: int, stop: int) -> "MarkedTokens":
        """Tokens `start … stop - 1`."""
        return MarkedTokens(self.ids[start:stop], self.trained[start:stop])


def documents(starts: Int64Array, length: int) -> tuple[npt.NDArray[np.int32], Int64Array]:
    """Segments and positions [length] of a row whose documents start there, the first at 0."""
    places = np.arange(length)
    segments = np.searchsorted(starts, places, side="right") - 1
    return segments.astype(np.int32), places - starts[segments]


class Samples(Protocol):
    """Samples of equal form. The order of training permutes samples, never rows."""

    sequence_length: int
    rows_per_sample: int
    """1. The rows of a pair, which stay in one micro batch, are 2."""

    def __len__(self) -> int: ...

    def rows(self, index: int) -> Sequence[Row]:
        """The rows of sample `index`. Raises DataError for data that cannot be used."""
        ...
