"""The order of samples: a permutation per epoch, the same for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.data.order import EpochOrder, mix64

GOLDEN_10 = [3, 8, 0, 4, 6, 9, 5, 7, 2, 1, 2, 0, 1, 3, 6, 9, 7, 8, 4, 5]
GOLDEN_LARGE = [219659, 16839, 172760, 418937, 320831, 499572]
GOLDEN_HUGE = [1696430580, 6073297610, 3630465124]


def test_mix64_is_splitmix64() -> None:
    # First outputs of splitmix64 seeded with 0: state n gamma, finalised.
    states = np.array([0, 0x9E3779B97F4A7C15], dtype=np.uint64)
    assert [hex(v) for v in mix64(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
    ]


def test_golden_order() -> None:
    """These numbers must never change: they decide what a resumed run sees."""
    assert EpochOrder(1234, 10).indices(0, 20).tolist() == GOLDEN_10
    assert EpochOrder(0, 1_000_003).indices(5, 6).tolist() == GOLDEN_LARGE
    assert EpochOrder(1234, 2**33).indices(2**34 + 1, 3).tolist() == GOLDEN_HUGE


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4096, 4097, 65537])
def test_an_epoch_holds_every_sample_once(size: int) -> None:
    order = EpochOrder(7, size).indices(3 * size, size)
    assert np.array_equal(np.sort(order), np.arange(size))


@given(
    seed=st.integers(0, 2**40),
    size=st.integers(1, 5000),
    start=st.integers(0, 10**6),
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=5),
)
def test_asking_in_parts_gives_the_same(
    seed: int, size: int, start: int, counts: list[int]
) -> None:
    whole = EpochOrder(seed, size).indices(start, sum(counts))
    starts = start + np.cumsum([0, *counts[:-1]])
    parts = [
        EpochOrder(seed, size).indices(int(s), c) for s, c in zip(starts, counts, strict=True)
    ]
    assert np.array_equal(whole, np.concatenate(parts))


def test_places_are_uniform_and_neighbours_are_not_kept() -> None:
    size = 10_000
    order = EpochOrder(3, size).indices(0, size)
    buckets = np.bincount(order[: size // 2] * 10 // size, minlength=10)
    assert np.all(np.abs(buckets - 500) < 110)  # 7 standard deviations
    assert np.count_nonzero(np.diff(order) == 1) < 10
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.05
