"""The best checkpoint interval, and the share of productive time, when machines fail.

A job alternates between training and restarting. Failures come at random with a constant
rate (a Poisson process): the job's mean time between failures M is that of one GPU divided
by the number of GPUs. A save stops training for δ seconds (`stall_s`) and is usable once it is
committed, w seconds later (`commit_s`): zero if training waits for the disk. A failure costs
the work since the last committed save, and R seconds (`restart_s`) until training continues;
another failure in between starts these again.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006.
"""

import math
from dataclasses import dataclass

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Failures:
    """The cost of failures and saves of one job, in seconds."""

    mtbf_s: float
    """Mean time between failures of the whole job, M."""
    stall_s: float
    """Training waits for a save, δ."""
    commit_s: float
    """From the end of the stall until the save counts, w."""
    restart_s: float
    """From a failure until training continues, R."""

    @property
    def shortest_interval_s(self) -> float:
        """One save is in flight at a time: the next one begins when it is committed."""
        return self.commit_s


@dataclass(frozen=True)
class Shares:
    """Shares of a job's time; they add up to 1."""

    goodput: float
    """Training that is never repeated."""
    saving: float
    """Training waits for saves."""
    replay: float
    """Training that is lost by a failure."""
    restart: float
    """Between a failure and training."""


def young_interval_s(job: Failures) -> float:
    """√(2δM): the best interval to first order, for δ and the interval ≪ M (Young 1974)."""
    return math.sqrt(2 * job.stall_s * job.mtbf_s)


def daly_interval_s(job: Failures) -> float:
    """Seconds of training between saves that minimise the lost time (Daly 2006).

    A series in √(δ/2M), good to a few per cent for δ < M/2; M itself from δ = 2M on. It
    depends on neither R nor w, and neither does the exact optimum of `expected_shares`.
    """
    if job.stall_s >= 2 * job.mtbf_s:
        return job.mtbf_s
    root = math.sqrt(job.stall_s / (2 * job.mtbf_s))
    return young_interval_s(job) * (1 + root / 3 + root**2 / 9) - job.stall_s


def best_interval_s(job: Failures) -> float:
    """Daly's interval, but no shorter than a save takes."""
    return max(daly_interval_s(job), job.shortest_interval_s)


def expected_shares(job: Failures, interval_s: float) -> Shares:
    """Shares of the time of a long job that saves after every `interval_s` of training.

    Exact for the process that the module describes. Between two restarts training runs for
    an exponential time of mean M; the k-th save counts if that is at least k(τ + δ) + w, so

        work kept = τ · e^(−w/M) / (e^((τ+δ)/M) − 1)

    and getting through R seconds without a failure takes M(e^(R/M) − 1). With w = 0 this is
    Daly's complete model (2006): goodput = τ / (M e^(R/M) (e^((τ+δ)/M) − 1)).
    """
    mean, cycle = job.mtbf_s, interval_s + job.stall_s
    running = math.exp(-job.restart_s / mean)
    again = -math.expm1(-cycle / mean)
    """Probability of a failure between two saves."""
    kept = interval_s * math.exp(-(job.commit_s + cycle) / mean) / again
    stalls = mean * (math.exp(-interval_s / mean) - math.exp(-cycle / mean)) / again
    goodput, saving = running * kept / mean, running * stalls / mean
    return Shares(goodput, saving, running - goodput - saving, 1 - running)
