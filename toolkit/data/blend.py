"""Blends several sources: which samples of which source are used, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from toolkit.data.interleave import Interleaving
from toolkit.data.order import EpochOrder, Order
from toolkit.data.rows import Int64Array, Row, Samples


class JoinedSamples:
    """The samples of several sources, numbered one source after the other."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        """`parts` have rows of the same format, length and number."""
        self.parts = tuple(parts)
        self.sequence_length = parts[0].sequence_length
        self.rows_per_sample = parts[0].rows_per_sample
        self.starts = np.cumsum([0, *map(len, parts)])
        """Number of the first sample of each source, and behind the last."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def rows(self, index: int) -> Sequence[Row]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.parts[part].rows(index - int(self.starts[part]))


@dataclass(frozen=True)
class Stage:
    """The weights of a blend's sources from a sample on."""

    first: int
    """Samples consumed before."""
    weights: Interleaving


class BlendOrder:
    """The order of samples of a blend, as `JoinedSamples` numbers them.

    Every source has its own order, pass after pass, and continues across a change of the
    weights.
    """

    def __init__(self, seed: int, sizes: Sequence[int], stages: Sequence[Stage]) -> None:
        """`sizes` are samples of each source. The first stage begins at 0."""
        self._sizes = sizes
        self._starts = np.cumsum([0, *sizes])
        self._orders: list[Order] = [
            EpochOrder(seed, size, number) for number, size in enumerate(sizes)
        ]
        self._stages = tuple(stages)
        self._before = [np.zeros(len(sizes), dtype=np.int64)]
        """Samples of each source that were seen before each stage."""
        for stage, following in pairwise(stages):
            seen = stage.weights.counts(following.first - stage.first)
            self._before.append(self._before[-1] + seen)

    def indices(self, position: int, count: int) -> Int64Array:
        found = np.empty(count, dtype=np.int64)
        for number, stage in enumerate(self._stages):
            low = max(position, stage.first)
            high = position + count
            if number + 1 < len(self._stages):
                high = min(high, self._stages[number + 1].first)
            if low < high:
                part = self._in_stage(number, low - stage.first, high - low)
                found[low - position : high - position] = part
        return found

    def _in_stage(self, number: int, start: int, count: int) -> Int64Array:
        sources, places = self._stages[number].weights.sources(start, count)
        found = np.empty(count, dtype=np.int64)
        for source in np.unique(sources):
            here = sources == source
            first = int(self._before[number][source] + places[here][0])
            order = self._orders[source].indices(first, int(here.sum()))
            found[here] = self._starts[source] + order
        return found

    def counts(self, samples: int) -> Int64Array:
        """Number of samples of each source among the first `samples`, including repeated
        ones."""
        number = max(n for n, stage in enumerate(self._stages) if stage.first <= samples)
        stage = self._stages[number]
        return self._before[number] + stage.weights.counts(samples - stage.first)

    def begun(self, samples: int) -> list[tuple[int, tuple[int, ...]]]:
        """The stages of the first `samples`: first sample and weights of each."""
        return [
            (stage.first, stage.weights.parts)
            for stage in self._stages
            if stage.first < max(samples, 1)
        ]


def exact(weight: float) -> Fraction:
    """The decimal number that a recipe states: 0.1 is a tenth."""
    return Fraction(repr(weight))
