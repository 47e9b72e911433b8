"""The timetable against the closed forms of pipeline papers, and its own rules."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.extras.page.timetable import Timetable, timetable

EQUAL = (1.0, 2.0)
"""Seconds forward and backward."""
SHAPES = [(1, 4, 1), (2, 1, 1), (2, 8, 1), (4, 4, 1), (4, 16, 1), (8, 3, 1), (2, 2, 2),
          (4, 8, 2), (4, 16, 5), (8, 16, 3)]  # fmt: skip


@pytest.mark.parametrize(("pp", "micro_batches", "vpp"), SHAPES)
def test_total_and_bubble_are_narayanans(pp: int, micro_batches: int, vpp: int) -> None:
    """arXiv:2104.04473, section 2.2: the bubble is (p - 1)(t_f + t_b) / v on every rank."""
    found = timetable([EQUAL] * pp, micro_batches, vpp)
    bubble = (pp - 1) * 3.0 / vpp
    assert found.total_s == pytest.approx(micro_batches * 3.0 + bubble)
    for rank in range(pp):
        assert found.idle_s(rank) == pytest.approx(bubble)


def test_a_slow_last_stage_decides() -> None:
    """The stage with the logits never waits between its first and its last micro batch."""
    slow = (2.0, 4.0)
    found = timetable([EQUAL, EQUAL, EQUAL, slow], 16)
    assert found.total_s == pytest.approx(16 * 6.0 + 3 * 3.0)
    assert found.idle_s(3) == pytest.approx(3 * 3.0)


def test_a_slow_stage_in_the_middle_fills_its_wait() -> None:
    """Rank 1 waits 1 s for its first input, 2 s at the end, and 6 s for its first gradient,
    of which it spends 4 on the two micro batches of its warm-up."""
    slow = (2.0, 4.0)
    found = timetable([EQUAL, slow, EQUAL, EQUAL], 16)
    assert found.total_s == pytest.approx(16 * 6.0 + 1 + 2 + (6 - 4))


def test_messages_delay_every_hop() -> None:
    """One micro batch crosses pp - 1 borders forward and as many backward."""
    found = timetable([EQUAL] * 4, 1, message_s=0.25)
    assert found.total_s == pytest.approx(4 * 3.0 + 2 * 3 * 0.25)


def test_warm_up_of_one_f_one_b() -> None:
    found = timetable([EQUAL] * 4, 8)
    for rank, slots in enumerate(found.slots):
        first_backward = next(i for i, slot in enumerate(slots) if slot.direction != "forward")
        assert first_backward == 4 - rank  # so many micro batches wait on this rank at most


def test_warm_up_of_the_interleaved_schedule() -> None:
    """megatron-core: (vpp - 1) · pp chunks, and two for every rank that follows."""
    found = timetable([EQUAL] * 4, 8, vpp=2)
    for rank, slots in enumerate(found.slots):
        first_backward = next(i for i, slot in enumerate(slots) if slot.direction != "forward")
        assert first_backward == 2 * (4 - rank - 1) + 4 + 1


@given(pp=st.integers(1, 5), groups=st.integers(1, 4), vpp=st.integers(1, 3), data=st.data())
def test_passes_are_complete_and_follow_each_other(
    pp: int, groups: int, vpp: int, data: st.DataObject
) -> None:
    seconds = st.floats(0.1, 3.0)
    stages = [(data.draw(seconds), data.draw(seconds)) for _ in range(pp)]
    found = timetable(stages, groups * pp, vpp, data.draw(st.floats(0.0, 1.0)))
    _check_rank_order(found, groups * pp, vpp)
    when = {
        (slot.direction, slot.micro_batch, slot.chunk * pp + slot.rank): slot
        for rank in found.slots
        for slot in rank
    }
    for (direction, micro_batch, place), slot in when.items():
        step = 1 if direction == "forward" else -1
        before = when.get((direction, micro_batch, place - step))
        if before is None and direction == "backward":
            before = when["forward", micro_batch, place]
        assert before is None or slot.start_s >= before.sent_s


def _check_rank_order(found: Timetable, micro_batches: int, vpp: int) -> None:
    """Every micro batch once through every chunk and direction, never two at a time."""
    for slots in found.slots:
        seen = Counter((slot.direction, slot.micro_batch, slot.chunk) for slot in slots)
        assert len(seen) == 2 * micro_batches * vpp
        assert set(seen.values()) == {1}
        for one, other in pairwise(slots):
            assert other.start_s >= one.sent_s
