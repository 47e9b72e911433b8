"""How long a collective may take is the recipe's decision, in every group of every engine."""

import pytest

from tests.engines.cases import MIXTRAL, megatron
from tests.engines.limits_worker import limits, wait_for_a_rank_that_does_not_come
from tests.engines.parity_worker import Case, alone
from tests.forked import run_ranks
from tests.processes import HANG_S
from toolkit.train.marks import collective_limit

CASES = [
    Case("ddp", 2),
    *(Case("deepspeed", 2, stage=stage) for stage in (0, 2, 3)),
    megatron(tensor=2),
    megatron(pipeline=2),
    megatron(stage=1, recompute="full"),
    megatron(expert=2, family=MIXTRAL),
    Case("fsdp", 2, stage=3),
]


@pytest.mark.slow
@pytest.mark.quick
def test_every_group_of_every_engine_has_the_limit() -> None:
    """And a closed engine leaves no model: each has groups, whose threads poll."""
    found = run_ranks(alone, 2, limits, CASES)
    for rank in found:
        for case in CASES:
            assert rank[case.name]["patient"] == 24 * 3600, case.name
            assert set(rank[case.name]["others"]) == {2 * 3600}, case.name
            assert rank[case.name]["kept"] == 0, case.name


@pytest.mark.slow
@pytest.mark.quick
def test_a_collective_is_given_up_when_the_limit_is_over() -> None:
    waited_s, _ = run_ranks(wait_for_a_rank_that_does_not_come, 2, 1.0)
    assert 1.0 <= waited_s < HANG_S


@pytest.mark.parametrize("limit_s", [5.0, 1800.0, 3600.0])
def test_our_limit_comes_first(limit_s: float) -> None:
    longest_way_s = 2 * (3 * limit_s) + 20  # in the first step
    assert collective_limit(limit_s).total_seconds() > longest_way_s
