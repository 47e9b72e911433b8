"""Rows of whole conversations."""

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toolkit.data.packing import pack


@given(
    st.integers(1, 60).flatmap(
        lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity)))
    )
)
def test_every_sample_is_in_one_row_and_no_row_is_too_long(case: tuple[int, list[int]]) -> None:
    capacity, given_lengths = case
    lengths = np.array(given_lengths, dtype=np.int64)
    rows = pack(lengths, capacity)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(lengths[row].sum() <= capacity for row in rows)
    # No two rows would fit into one.
    filled = sorted(int(lengths[row].sum()) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > capacity
    assert rows == sorted(rows) == pack(lengths, capacity)


def test_skewed_lengths_fill_their_rows_in_seconds() -> None:
    """97% of the positions, in 10 s on one core."""
    capacity = 4096
    drawn = np.random.default_rng(1).lognormal(mean=5.5, sigma=1.2, size=100_000)
    lengths = np.clip(drawn, 8, capacity).astype(np.int64)
    start = time.process_time()
    rows = pack(lengths, capacity)
    assert time.process_time() - start < 10
    assert lengths.sum() / (len(rows) * capacity) > 0.97
