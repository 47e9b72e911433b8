"""Which samples move where, by measured speeds."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.layout import Layout
from toolkit.train.balance import apportion, delays_of, measure, speeds_of
from toolkit.train.shared import BatchSplit, with_shares

SPEEDS = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


@given(SPEEDS, st.integers(0, 8))
def test_no_other_shares_are_done_earlier(speeds: list[float], more: int) -> None:
    total = len(speeds) + more
    every = [
        max(n / speed for n, speed in zip(shares, speeds, strict=True))
        for shares in product(range(1, total + 1), repeat=len(speeds))
        if sum(shares) == total
    ]
    found = apportion(speeds, total)
    assert sum(found) == total and min(found) >= 1
    assert max(n / speed for n, speed in zip(found, speeds, strict=True)) == min(every)


def test_a_data_parallel_rank_is_as_fast_as_its_slowest_rank() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    rates = (4.0, 4.0, 4.0, 4.0, 4.0, 1.0, 4.0, 4.0)
    assert speeds_of(rates, layout) == [1.0, 4.0]
    delays = delays_of(rates)
    assert delays[5] == 4.0 and {*delays[:5], *delays[6:]} == {1.0}
    assert delays_of((4.0, 2.0)) == [0.5, 2.0]


def test_a_split_changes_from_a_step_on_and_continues() -> None:
    planned = Layout(dp=2, micro_batch=3, gradient_accumulation=2)
    moved, split = with_shares(planned, (4, 2)), BatchSplit(planned)
    split.change(moved, 7)
    assert [split.at(step).micro_batches for step in (6, 7)] == [(3, 3), (4, 2)]
    later = BatchSplit(planned)
    later.resume(moved, 12)
    assert later.at(0) == moved
    for other in (Layout(dp=4, micro_batch=3), with_shares(planned, (8, 4))):
        kept = BatchSplit(planned)
        kept.resume(other, 6)  # other ranks, or batches of 6 to come
        assert kept.at(0) == planned


def test_a_full_device_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "ones", full)
    assert math.isnan(measure(64, torch.device("cpu"), "fp32"))
