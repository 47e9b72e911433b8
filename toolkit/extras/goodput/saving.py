"""The cost of saves and failures for a planned recipe, from 8 to 100,000 accelerators."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.extras.goodput.failures import (
    SECONDS_PER_HOUR,
    Failures,
    Shares,
    best_interval_s,
    expected_shares,
)
from toolkit.hardware.catalogue import GIGA
from toolkit.hardware.cluster import Cluster
from toolkit.plan.checkpoint_size import checkpoint_bytes

BARRIER_S = 0.6
"""Seconds that a save stops training in addition to the copy: ranks wait for each other. 0.59 s
of blocking were measured for 405B on 8,960 GPUs (ByteCheckpoint, arXiv:2407.20143, table 8)."""
DEFAULT_GBPS = 1.0
"""GB/s of storage per node. Llama 3 had 2 TB/s for 2,048 nodes (arXiv:2407.21783, 3.3.1)."""
DEFAULT_RESTART_MIN = 10.0
"""From a failure to ranks that load. Finding and diagnosing a fault took MegaScale less than
10 minutes (arXiv:2402.15627, 6.3); recovery at about 100,000 GPUs stalls 10 (2602.00277)."""
SIZES = (8, 64, 512, 1024, 4096, 16_384, 32_768, 100_000)
"""Accelerators for which there is always a row."""


@dataclass(frozen=True)
class Assumptions:
    """Inputs that are not part of a plan."""

    mtbf_hours: float
    """Mean time between failures of one accelerator with everything that it needs: its share
    of host, network, power and software. 54 days × 24 × 16,384 / 419 = 50,700 for Llama 3."""
    checkpoint_gbps: float = DEFAULT_GBPS
    """What one node writes and reads, all nodes at once, in GB/s."""
    restart_minutes: float = DEFAULT_RESTART_MIN
    """From a failure until ranks load the checkpoint."""


@dataclass(frozen=True)
class GoodputRow:
    """A job of one size, saving as often as is best."""

    gpus: int
    job: Failures
    interval_s: float
    interval_steps: int | None
    """None if the plan has no step time for this size."""
    shares: Shares
    synchronous_goodput: float
    """With synchronous saves, at their best interval."""

    def machine_output(self) -> dict[str, Any]:
        """For `--json`."""
        lost = asdict(self.shares)
        return {
            "gpus": self.gpus,
            "mtbf_hours": self.job.mtbf_s / SECONDS_PER_HOUR,
            "stall_s": self.job.stall_s,
            "commit_s": self.job.commit_s,
            "restart_s": self.job.restart_s,
            "interval_s": self.interval_s,
            "interval_steps": self.interval_steps,
            "goodput": lost.pop("goodput"),
            "lost": lost,
            "goodput_synchronous": self.synchronous_goodput,
        }


@dataclass(frozen=True)
class PlannedRun:
    """A planned recipe."""

    parameters: int
    cluster: Cluster
    step_s: float | None
    """Of the plan's step; None where it is unknown."""
    steps: int | None = None
    """Of the whole run; None if it depends on unread data."""
    every_steps: int | None = None
    """Between saves, as the recipe says; None for none before the end."""
    frozen: int = 0
    """Of the parameters, those that do not train."""

    @property
    def checkpoint_bytes(self) -> float:
        """Of one checkpoint."""
        return float(checkpoint_bytes(self.parameters - self.frozen, self.frozen))


def goodput_as_written(job: PlannedRun, assumed: Assumptions) -> float | None:
    """Expected goodput on the recipe's own cluster with the recipe's own interval.

    None where it saves at the end only, or where the time of its steps is unknown.
    """
    if job.every_steps is None or job.step_s is None:
        return None
    there = failures(job, job.cluster.gpus, assumed)
    interval_s = max(job.every_steps * job.step_s, there.shortest_interval_s)
    return expected_shares(there, interval_s).goodput


def failures(job: PlannedRun, gpus: int, assumed: Assumptions) -> Failures:
    """The cost of a save and a failure if the same state is spread evenly over `gpus`.

    DMT saves asynchronously: training waits while every accelerator copies its part to
    host memory, and continues while the nodes write. The copy counts in full, although a GPU
    makes it alongside the next forward and backward pass: that has not been measured.
    """
    nodes = math.ceil(gpus / job.cluster.gpus_per_node)
    transfer_s = job.checkpoint_bytes / (nodes * assumed.checkpoint_gbps * GIGA)
    copy_s = job.checkpoint_bytes / gpus / job.cluster.host_link_bytes_per_s
    return Failures(
        mtbf_s=assumed.mtbf_hours * SECONDS_PER_HOUR / gpus,
        stall_s=BARRIER_S + copy_s,
        commit_s=transfer_s,
        restart_s=assumed.restart_minutes * 60 + transfer_s,
    )


def synchronous(job: Failures) -> Failures:
    """The same where training waits until a save is committed."""
    return Failures(job.mtbf_s, job.stall_s + job.commit_s, 0.0, job.restart_s)


def rows(job: PlannedRun, assumed: Assumptions) -> Iterator[GoodputRow]:
    """A row for each of `SIZES` and for the recipe's own cluster, the smallest first."""
    for gpus in sorted({*SIZES, job.cluster.gpus}):
        yield row(job, gpus, assumed)


def row(job: PlannedRun, gpus: int, assumed: Assumptions) -> GoodputRow:
    """The best interval for one size; in whole steps if the plan has their time."""
    there = failures(job, gpus, assumed)
    interval_s, steps = best_interval_s(there), None
    if gpus == job.cluster.gpus and job.step_s is not None:
        fewest = math.ceil(there.shortest_interval_s / job.step_s)
        steps = max(1, fewest, round(interval_s / job.step_s))
        interval_s = steps * job.step_s
    waiting = synchronous(there)
    return GoodputRow(
        gpus,
        there,
        interval_s,
        steps,
        expected_shares(there, interval_s),
        expected_shares(waiting, best_interval_s(waiting)).goodput,
    )
