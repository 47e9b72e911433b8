"""What saves and failures cost a planned recipe."""

import pytest

from toolkit.extras.goodput.failures import expected_shares
from toolkit.extras.goodput.saving import (
    BARRIER_S,
    SIZES,
    Assumptions,
    PlannedRun,
    failures,
    goodput_as_written,
    row,
    rows,
    synchronous,
)
from toolkit.hardware.cluster import parse_cluster

SIXTEEN = parse_cluster("2x8xh100-80gb")
JOB = PlannedRun(8_000_000_000, SIXTEEN, step_s=10.0, steps=100_000, every_steps=500)
ASSUMED = Assumptions(48_000)


def test_costs_by_hand() -> None:
    """96 GB on two nodes: 48 s at 1 GB/s each; 6 GB over each H100's 64 GB/s."""
    assert JOB.checkpoint_bytes == 96e9
    there = failures(JOB, 16, ASSUMED)
    assert there.mtbf_s == 3000 * 3600
    assert there.stall_s == pytest.approx(BARRIER_S + 6 / 64)
    assert there.commit_s == pytest.approx(48)
    assert there.restart_s == pytest.approx(10 * 60 + 48)
    waiting = synchronous(there)
    assert (waiting.stall_s, waiting.commit_s) == (there.stall_s + 48, 0)


def test_what_is_assumed_counts() -> None:
    slow = failures(JOB, 16, Assumptions(48_000, checkpoint_gbps=0.5, restart_minutes=0))
    assert (slow.commit_s, slow.restart_s) == (pytest.approx(96), pytest.approx(96))


def test_a_part_of_a_node_writes_like_a_node() -> None:
    assert failures(JOB, 9, ASSUMED).commit_s == failures(JOB, 16, ASSUMED).commit_s


def test_every_size_and_the_recipes_own_once() -> None:
    assert [one.gpus for one in rows(JOB, ASSUMED)] == sorted([*SIZES, 16])
    eight = PlannedRun(JOB.parameters, parse_cluster("8xh100-80gb"), 1.0)
    assert [one.gpus for one in rows(eight, ASSUMED)] == list(SIZES)


def test_steps_only_where_their_time_is_known() -> None:
    own = row(JOB, 16, ASSUMED)
    assert own.interval_steps == round(own.interval_s / 10) > 0
    assert own.interval_s % 10 == 0
    assert row(JOB, 64, ASSUMED).interval_steps is None
    unknown = PlannedRun(JOB.parameters, SIXTEEN, None)
    assert row(unknown, 16, ASSUMED).interval_steps is None


def test_at_least_one_step_and_the_time_of_a_save() -> None:
    often = Assumptions(0.01)
    slow_steps = PlannedRun(JOB.parameters, SIXTEEN, 1000.0)
    assert row(slow_steps, 16, often).interval_steps == 1
    uneven = PlannedRun(JOB.parameters, SIXTEEN, 15.0)
    assert row(uneven, 16, often).interval_steps == 4  # 47.3 s or more, in steps of 15 s


def test_goodput_of_the_recipe_as_it_is() -> None:
    there = failures(JOB, 16, ASSUMED)
    found = goodput_as_written(JOB, ASSUMED)
    assert found == expected_shares(there, 5000).goodput < row(JOB, 16, ASSUMED).shares.goodput
    assert goodput_as_written(PlannedRun(JOB.parameters, SIXTEEN, 10.0), ASSUMED) is None


def test_waiting_for_the_disk_is_never_better() -> None:
    for one in rows(JOB, ASSUMED):
        assert one.synchronous_goodput < one.shares.goodput
