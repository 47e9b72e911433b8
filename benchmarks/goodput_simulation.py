"""Two other ways to a goodput, to compare the planner's formulas with."""

import random

from toolkit.extras.goodput.failures import Failures, Shares


def first_order_goodput(job: Failures, interval_s: float) -> float:
    """1 − δ/τ − (τ/2 + w + R)/M: Young's reckoning, for R, w and τ ≪ M only.

    The published estimates of large clusters are of this kind (Kokolis et al.,
    arXiv:2410.21680: E[ETTR]). Below zero where failures are frequent: of no use there.
    """
    lost = interval_s / 2 + job.commit_s + job.restart_s
    return 1 - job.stall_s / interval_s - lost / job.mtbf_s


def simulated_shares(job: Failures, interval_s: float, failures: int, seed: int = 0) -> Shares:
    """The same shares, counted event by event over so many failures; no formula involved."""
    chance = random.Random(seed)
    spent = {"useful": 0.0, "saving": 0.0, "replay": 0.0, "restart": 0.0}
    for _ in range(failures):
        left = chance.expovariate(1 / job.mtbf_s)
        useful, trained, stalled = _until_failure(job, interval_s, left)
        spent["useful"] += useful
        spent["replay"] += trained - useful
        spent["saving"] += stalled
        while (survived := chance.expovariate(1 / job.mtbf_s)) < job.restart_s:
            spent["restart"] += survived
        spent["restart"] += job.restart_s
    whole = sum(spent.values())
    return Shares(*(seconds / whole for seconds in spent.values()))


def _until_failure(job: Failures, interval_s: float, left: float) -> tuple[float, float, float]:
    """Work that is kept, work that is done, and stalls of `left` seconds of running."""
    now = kept = trained = stalled = 0.0
    in_flight: list[tuple[float, float]] = []
    """When a save is committed, and the work that it holds."""
    while now < left:
        step = min(interval_s, left - now)
        now, trained = now + step, trained + step
        stall = min(job.stall_s, left - now)
        now, stalled = now + stall, stalled + stall
        if now < left:
            in_flight.append((now + job.commit_s, trained))
        while in_flight and in_flight[0][0] < min(now, left):
            kept = in_flight.pop(0)[1]
    for committed, work in in_flight:
        if committed < left:
            kept = work
    return kept, trained, stalled
