"""The order of a blend's sources: shares at every prefix, random access, no state."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toolkit.data.interleave import MAX_PERIOD, Interleaving, whole_parts

WEIGHTS = st.lists(st.integers(0, 9000), min_size=1, max_size=40).filter(any)


def exact(weights: list[float]) -> list[Fraction]:
    return [Fraction(str(weight)) for weight in weights]


def largest_deviation(weights: list[Fraction], sources: np.ndarray) -> float:
    """Over all prefixes and sources: samples more or less than the source's share."""
    n = np.arange(1, len(sources) + 1)
    shares = [float(weight / sum(weights)) for weight in weights]
    return max(
        float(np.abs(np.cumsum(sources == number) - n * share).max())
        for number, share in enumerate(shares)
    )


@given(WEIGHTS)
def test_any_weights(weights: list[int]) -> None:
    mixed = Interleaving([Fraction(weight) for weight in weights])
    sources, _ = mixed.sources(0, mixed.period)
    assert largest_deviation([Fraction(w) for w in weights], sources) < 1
    assert [int((sources == number).sum()) for number in range(len(weights))] == [*mixed.parts]


@given(WEIGHTS, st.integers(0, 10**12), st.integers(1, 300))
def test_any_place_is_answered_without_those_before(
    weights: list[int], start: int, count: int
) -> None:
    mixed = Interleaving([Fraction(weight) for weight in weights])
    sources, before = mixed.sources(start, count)
    assert (before >= mixed.counts(start)[sources]).all()
    for number in np.unique(sources).tolist():
        places = before[sources == number]
        assert places.tolist() == [*range(places[0], places[0] + len(places))]
        assert places[0] == mixed.counts(start)[number]


def test_weights_as_whole_numbers() -> None:
    assert whole_parts(exact([0.7, 0.2, 0.1])) == (7, 2, 1)
    assert whole_parts(exact([1.0, 0.0])) == (1, 0)
    assert whole_parts([Fraction(2 * 10**12), Fraction(10**12)]) == (2, 1)
    parts = whole_parts([Fraction(10**12 + 1), Fraction(10**9 + 7), Fraction(1)])
    assert sum(parts) == MAX_PERIOD
    assert parts[1:] == (1048, 1)
