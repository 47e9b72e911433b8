"""The source of each sample of a blend, computed from the weights and the sample's position.

The sequence is fair at every position. Of the first *n* samples, a source of weight *w* (of a
sum of 1) has more than n·w − 1 and less than n·w + 1. So sample k of a source (k = 0, 1, …)
must come between positions ⌊k/w⌋ and ⌈(k + 1)/w⌉ − 1, its window. At each position, take the
sample whose window closes first. This meets all windows (Baruah, Cohen, Plaxton and Varvel,
"Proportionate progress: a notion of fairness in resource allocation", Algorithmica 15, 1996).
With whole numbers as weights the sequence repeats after their sum. So one period is stored, and
any position is looked up directly.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np

from toolkit.data.rows import Int64Array

MAX_PERIOD = 2**20
"""Longest period, in samples. Weights that need a longer one are rounded to such parts."""


class Interleaving:
    """The endless sequence of sources with given weights. A source of weight 0 never comes."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self.parts = whole_parts(weights)
        """Samples of each source in every period."""
        self.period = sum(self.parts)

    @cached_property
    def _sources(self) -> Int64Array:
        """The source of each place of a period."""
        return _one_period(self.parts)

    @cached_property
    def _ranks(self) -> Int64Array:
        """At each place of a period, how many samples of the same source lie before it."""
        ranks = np.empty(self.period, dtype=np.int64)
        for source, part in enumerate(self.parts):
            ranks[self._sources == source] = np.arange(part)
        return ranks

    def sources(self, start: int, count: int) -> tuple[Int64Array, Int64Array]:
        """For places `start … start + count - 1`: the source, and the number of its samples
        before that place. Two arrays [count]."""
        periods, within = np.divmod(np.arange(start, start + count), self.period)
        chosen = self._sources[within]
        return chosen, periods * np.array(self.parts)[chosen] + self._ranks[within]

    def counts(self, n: int) -> Int64Array:
        """Samples of each source among the first `n`."""
        periods, within = divmod(n, self.period)
        rest = np.bincount(self._sources[:within], minlength=len(self.parts))
        return periods * np.array(self.parts) + rest


def whole_parts(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """The weights as whole numbers without a common divisor.

    Their sum is at most MAX_PERIOD: where the exact numbers are larger, they are rounded so
    that every source with a weight has at least 1.
    """
    scale = lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * scale) for weight in weights]
    common = gcd(*parts)
    total = sum(parts) // common
    if total > MAX_PERIOD:
        exact = [Fraction(part // common * MAX_PERIOD, total) for part in parts]
        parts, common = [max(round(part), 1) if part else 0 for part in exact], 1
        # The change by rounding is small compared with the largest.
        parts[parts.index(max(parts))] += MAX_PERIOD - sum(parts)
    return tuple(part // common for part in parts)


def _one_period(parts: Sequence[int]) -> Int64Array:
    """The source at each place of a period: of the open windows, the one that closes first."""
    period = sum(parts)
    waiting = [(0, source, 0) for source, n in enumerate(parts) if n]
    """(place where the window opens, source, number of its sample), for every source's next
    sample."""
    ready: list[tuple[int, int, int]] = []
    """(place where the window closes, source, number of its sample)"""
    sources = np.empty(period, dtype=np.int64)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, source, k = heappop(waiting)
            heappush(ready, (-(-(k + 1) * period // parts[source]) - 1, source, k))
        closes, source, k = heappop(ready)
        assert closes >= place, "a window was missed"
        sources[place] = source
        heappush(waiting, ((k + 1) * period // parts[source], source, k + 1))
    return sources
