"""The formulas against a simulation, their source's own numbers, and each other."""

import math

import pytest
from goodput_simulation import first_order_goodput, simulated_shares

from toolkit.extras.goodput.failures import (
    Failures,
    Shares,
    best_interval_s,
    daly_interval_s,
    expected_shares,
    young_interval_s,
)

MINUTE, HOUR = 60.0, 3600.0
JOBS = [
    Failures(24 * HOUR, 20, 30, 300),
    Failures(3 * HOUR, 60, 0, 600),
    Failures(1 * HOUR, 10, 120, 300),
    Failures(30 * MINUTE, 1, 5, 600),
    Failures(30 * MINUTE, 120, 0, 300),
    Failures(15 * MINUTE, 300, 0, 300),  # the interval is 0.6 of the MTBF
    Failures(5 * MINUTE, 40, 90, 600),  # restarts fail more often than not
    Failures(5 * MINUTE, 300, 0, 300),  # a save takes as long as machines live
]


def total(shares: Shares) -> float:
    return shares.goodput + shares.saving + shares.replay + shares.restart


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("factor", [0.5, 1, 3])
def test_closed_form_is_what_a_simulation_counts(job: Failures, factor: float) -> None:
    interval = max(factor * daly_interval_s(job), job.shortest_interval_s)
    expected = expected_shares(job, interval)
    counted = simulated_shares(job, interval, failures=20_000)
    assert total(expected) == pytest.approx(1) == total(counted)
    for name in ("goodput", "saving", "replay", "restart"):
        exact, found = getattr(expected, name), getattr(counted, name)
        assert found == pytest.approx(exact, rel=0.03, abs=0.002), name


@pytest.mark.parametrize("job", JOBS)
def test_no_other_interval_is_better(job: Failures) -> None:
    """Daly's series is an approximation: a thousandth of the time is what it may cost."""
    shortest = job.shortest_interval_s or 1e-3
    grid = [shortest * 1.01**power for power in range(2000)]
    best = max(expected_shares(job, tau).goodput for tau in grid if tau < 20 * job.mtbf_s)
    assert expected_shares(job, best_interval_s(job)).goodput > best - 0.001


@pytest.mark.parametrize(("mtbf_min", "best_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_own_numbers(mtbf_min: float, best_min: float) -> None:
    """Daly 2006, figures 3 to 5: dumps of 5 minutes, restarts of 10."""
    job = Failures(mtbf_min * MINUTE, 5 * MINUTE, 0, 10 * MINUTE)
    assert daly_interval_s(job) / MINUTE == pytest.approx(best_min, rel=0.006)


def test_where_a_save_takes_longer_than_machines_live() -> None:
    job = Failures(10, 20, 0, 1)
    assert daly_interval_s(job) == 10
    assert 0 < expected_shares(job, 10).goodput < 0.1


def test_young_is_the_limit_of_rare_failures() -> None:
    rare = Failures(1e9, 1, 0, 0)
    assert daly_interval_s(rare) == pytest.approx(young_interval_s(rare), rel=1e-3)
    assert young_interval_s(rare) == math.sqrt(2e9)


def test_one_save_at_a_time() -> None:
    """The next save begins when the last one is committed, however good it would be before."""
    slow = Failures(HOUR, stall_s=0.5, commit_s=600, restart_s=60)
    assert daly_interval_s(slow) < 61
    assert best_interval_s(slow) == 600


def test_the_first_order_holds_for_rare_failures_only() -> None:
    rare, often = Failures(24 * HOUR, 10, 60, 300), Failures(15 * MINUTE, 300, 0, 300)
    interval = best_interval_s(rare)
    exact = expected_shares(rare, interval).goodput
    assert first_order_goodput(rare, interval) == pytest.approx(exact, abs=0.001)
    assert first_order_goodput(often, best_interval_s(often)) < 0
    assert expected_shares(often, best_interval_s(often)).goodput > 0.25


def test_published_estimate_of_effective_training_time() -> None:
    """Kokolis et al., arXiv:2410.21680: (1 − N r (u0 + Δt/2)) / (1 + w/Δt), small losses."""
    nodes, rate_per_day, restart_s, write_s, interval_s = 256, 6.5e-3, 600, 60, HOUR
    day = 24 * HOUR
    published = 1 - nodes * rate_per_day * (restart_s + interval_s / 2) / day
    published /= 1 + write_s / interval_s
    job = Failures(day / (nodes * rate_per_day), write_s, 0, restart_s)
    assert expected_shares(job, interval_s).goodput == pytest.approx(published, abs=0.002)


def test_a_simulation_is_repeatable() -> None:
    job = JOBS[0]
    assert simulated_shares(job, 600, 50) == simulated_shares(job, 600, 50)
    assert simulated_shares(job, 600, 50) != simulated_shares(job, 600, 50, seed=1)
