"""PyTorch's caching allocator, against what its rules say of a few requests."""

import pytest

from toolkit.rehearse.gpu.allocator import MIB, Allocator, OutOfMemory, Request, least

SEPARATE, EXPANDABLE = False, True


def mib(*sizes: float) -> list[Request]:
    """Requests on the default stream: `3` is given to 3, `-3` takes it back."""
    return [(round(size * MIB), round(abs(size) * MIB), 0) for size in sizes]


def reserved(requests: list[Request], expandable: bool = SEPARATE, limit: int = 1000) -> float:
    return Allocator(expandable=expandable, limit=limit * MIB).replay(requests) / MIB


@pytest.mark.parametrize(
    ("sizes", "separate", "expandable"),
    [
        ([0.1, 0.2, 1], 2, 2),  # small ones share 2 MiB
        ([0.75, 0.74, 0.73, 0.72, 0.71], 6, 4),  # two in each; one segment has no ends
        ([1.5, 2, 9], 20, 20),  # large ones below 10 MiB share 20
        ([1, 2], 2 + 20, 2 + 20),  # never with small ones
    ],
)
def test_requests_share_segments(
    sizes: list[float], separate: float, expandable: float
) -> None:
    assert reserved(mib(*sizes)) == separate
    assert reserved(mib(*sizes), EXPANDABLE) == expandable


def test_a_request_has_whole_blocks() -> None:
    """2 MiB are 4096 blocks, however few bytes each request has."""
    requests = [(1, key, 0) for key in range(4096)]
    assert reserved(requests) == 2
    assert reserved([*requests, (1, 4096, 0)]) == 4


def test_large_requests_have_segments_of_their_own() -> None:
    assert reserved(mib(11)) == 12
    assert reserved(mib(11, 13)) == 12 + 14
    assert reserved(mib(11, 13), EXPANDABLE) == 40, "two pages"


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    freed = mib(100, 50, -100, -50)
    assert reserved([*freed, *mib(40, 99)]) == 150
    assert reserved([*freed, *mib(40, 60, 39)]) == 150, "the rest of 100 is split off"
    in_two = mib(52, -52, 25, 27, -25, 24.5, -27, 27.5)
    assert reserved(in_two) == 52 + 28, "half a MiB is not split off, which 27 could use"


def test_free_neighbours_are_joined() -> None:
    for order in [(-20, -21, -19), (-19, -20, -21), (-21, -19, -20)]:
        split = mib(60, -60, 20, 21, 19)
        assert reserved([*split, *mib(*order, 60)]) == 60
    assert reserved([*split, *mib(-20, -19, 39)]) == 60 + 40, "one in use is between them"


def test_free_segments_do_not_add_up_but_pages_do() -> None:
    requests = mib(30, 31, -30, -31, 60)
    assert reserved(requests) == 30 + 32 + 60
    assert reserved(requests, EXPANDABLE) == 80, "30 and 31 lie in four pages, and so does 60"
    kept = mib(40, 1.5, -40, 60)
    assert reserved(kept, EXPANDABLE) == 40 + 80, "at its beginning is no room for 60"
    assert reserved([*kept, *mib(38)], EXPANDABLE) == 120, "but for 38 is"


@pytest.mark.parametrize("expandable", [SEPARATE, EXPANDABLE])
def test_each_stream_has_blocks_of_its_own(expandable: bool) -> None:
    first = [(40 * MIB, 1, 7), (-40 * MIB, 1, 0)]
    assert reserved([*first, (40 * MIB, 2, 7)], expandable) == 40
    assert reserved([*first, (40 * MIB, 2, 0)], expandable) == 80


def test_free_memory_is_given_back_when_there_is_no_more() -> None:
    requests = mib(30, 31, -30, -31, 60)
    assert reserved(requests, limit=80) == 60
    split = mib(40, -40, 20, 60)
    assert reserved(split, limit=100) == 100
    with pytest.raises(OutOfMemory):
        reserved(split, limit=98)
    hole = mib(100, 101, 99, -101, 120)  # 101 MiB from 100 MiB on: pages 5 to 9 and 1 MiB
    assert reserved(hole, EXPANDABLE) == 420
    assert reserved(hole, EXPANDABLE, limit=400) == 320
    assert reserved([*hole, *mib(100.5)], EXPANDABLE, limit=420) == 420, "in the hole again"
    with pytest.raises(OutOfMemory):
        reserved(hole, EXPANDABLE, limit=319)


def test_the_least_memory() -> None:
    requests = mib(100, 102, -100, 150)
    assert reserved(requests) == 352
    free_again = least(requests, 352 * MIB, expandable=SEPARATE, steps=20) / MIB
    assert free_again == pytest.approx(252, rel=1e-4)
    assert least(mib(40, -40, 20, 60), 100 * MIB, expandable=SEPARATE) == 100 * MIB
    pages = least(requests, 360 * MIB, expandable=EXPANDABLE, steps=20) / MIB
    assert pages == pytest.approx(260, rel=1e-4), "252 in whole pages"
