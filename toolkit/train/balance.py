"""`parallel.balance`: every rank's speed, slow ranks, and samples that move to faster ones.

At checkpoint boundaries each rank computes products of the model's size for a moment. No other
rank takes part in them, so the rate is a rank's own under every engine: within a step, ranks
that gather weights or gradients layer by layer all take as long as the slowest. All ranks know
all rates and decide alike. The number of micro batches stays as it is planned.
"""

import math
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

import torch
import torch.distributed as dist

from toolkit.layout import Layout
from toolkit.plan.estimate import estimate_plan
from toolkit.train.shared import Worker, with_shares

PROBE_S = 0.5
"""Seconds of computing at a checkpoint: some periods of a scheduler that limits a process."""
QUIET_S = 120.0
"""Least time between measurements if nothing is to be balanced: they cost 0.5% at most."""
MEASUREMENTS = 3
"""So many measurements in a row must agree."""
LEAST_GAIN = 1.05
"""Predicted ratio of step times from which on samples are moved."""
SLOW = 1.25
"""A straggler takes this many times as long as the others."""
AHEAD = 2
"""Steps whose micro batches may be built already. See `Prefetch`."""
_ROWS = 1024


def apportion(speeds: Sequence[float], total: int) -> tuple[int, ...]:
    """Divide `total` samples, one per rank or more, among ranks of these speeds so that the
    last rank ends first.

    Each rank gets one. Each other sample goes to the rank that would end it first.
    """
    shares = [1] * len(speeds)
    waiting = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapify(waiting)
    for _ in range(total - len(speeds)):
        _, rank = heappop(waiting)
        shares[rank] += 1
        heappush(waiting, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


def seconds(layout: Layout, speeds: Sequence[float]) -> float:
    """The time of a step, in units of a sample at speed 1. All wait for the slowest
    data-parallel rank in every round of micro batches, so its time counts."""
    longest = max(n / speed for n, speed in zip(layout.micro_batches, speeds, strict=True))
    return layout.gradient_accumulation * longest


def speeds_of(rates: Sequence[float], layout: Layout) -> list[float]:
    """Speed of each data-parallel rank: the rate of its slowest rank."""
    found = [math.inf] * layout.dp
    for rank, rate in enumerate(rates):
        at = layout.data_rank(rank)
        found[at] = min(found[at], rate)
    return found


def delays_of(rates: Sequence[float]) -> list[float]:
    """Each rank's time for a product divided by the median time of all ranks. With two ranks,
    the other rank's time is the divisor."""
    own = [1 / rate for rate in rates]
    middle = statistics.median(own)
    return [one / (middle if len(own) > 2 else sum(own) - one) for one in own]


def product(left: torch.Tensor, right: torch.Tensor) -> None:
    """Multiply two matrices, one unit of work."""
    torch.mm(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)


def measure(width: int, device: torch.device, precision: str) -> float:
    """Products per second of [1024, width] with [width, width], on this rank alone. NaN if the
    device has no room for them."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    try:
        left = torch.ones(_ROWS, width, device=device, dtype=dtype)
        right = torch.ones(width, width, device=device, dtype=dtype)
        product(left, right)
    except torch.OutOfMemoryError:
        return math.nan
    count, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < PROBE_S:
        product(left, right)
        count += 1
    return max(count, 1) / passed


class Balancer:
    """Measures at checkpoints, reports stragglers and, with `parallel.balance: auto`, moves
    samples. Its methods are collective."""

    def __init__(self, worker: Worker, width: int) -> None:
        """`width`: the model's hidden size."""
        self.worker = worker
        self.width = width
        self._moves = worker.recipe.parallel.balance == "auto"
        self._last_s = time.monotonic()
        self._found: list[tuple[int, list[float]]] = []
        """The last measurements: the step, and each rank's rate in products per second."""
        self._named: set[int] = set()
        """Stragglers that were reported."""

    def at_checkpoint(self, step: int) -> list[str]:
        """Measure when due, after `step` steps. Returns, on rank 0, what to tell the user."""
        worker = self.worker
        if worker.ranks.world == 1 or not (self._moves or worker.together.rank_zero(self._due)):
            return []
        worker.marks.begin("measuring the speed of the ranks")
        mine = measure(self.width, worker.ranks.device, worker.recipe.training.precision)
        everyones: list[tuple[float, str]] = [(0.0, "")] * worker.ranks.world
        dist.all_gather_object(everyones, (mine, socket.gethostname()), worker.together.group)
        self._last_s = time.monotonic()
        rates = [rate for rate, _ in everyones]
        if any(map(math.isnan, rates)):
            return []
        self._found = [*self._found, (step, rates)][-MEASUREMENTS:]
        if len(self._found) < MEASUREMENTS:
            return []
        told = self._stragglers(step, [host for _, host in everyones])
        return told + (self._move(step) if self._moves else [])

    def _due(self) -> bool:
        return time.monotonic() - self._last_s >= QUIET_S

    def _stragglers(self, step: int, hosts: Sequence[str]) -> list[str]:
        """Report ranks that are slow in all measurements, each once until it recovers."""
        told = []
        every = [delays_of(rates) for _, rates in self._found]
        delays = dict(enumerate(zip(*every, strict=True)))
        slow = {rank for rank, each in delays.items() if min(each) >= SLOW}
        for rank in sorted(slow - self._named):
            ratio, since = statistics.median(delays[rank]), self._found[0][0]
            message = (
                f"rank {rank} on {hosts[rank]} computes {ratio:.2f} times as slowly as the "
                f"other ranks, since step {since} or before"
            )
            told.append(message)
            if self.worker.leads:
                self.worker.events.write(
                    "straggler", step=step, slow_rank=rank, host=hosts[rank],
                    slower=round(ratio, 3), since_step=since, message=message,
                )  # fmt: skip
        self._named = slow
        return told

    def _move(self, step: int) -> list[str]:
        """Move samples, if every measurement predicts a gain and the plan that they fit."""
        worker, layout = self.worker, self.worker.split.layout
        measured = [speeds_of(rates, layout) for _, rates in self._found]
        speeds = [statistics.median(each) for each in zip(*measured, strict=True)]
        shares = apportion(speeds, layout.round_samples)
        new = with_shares(layout, shares)
        gains = [seconds(layout, one) / seconds(new, one) for one in measured]
        if min(gains) < LEAST_GAIN or not worker.together.rank_zero(lambda: self._fits(new)):
            return []
        self._found = []
        worker.split.change(new, step + AHEAD)
        message = (
            f"from step {step + AHEAD + 1} on, micro batches have {[*shares]} samples on the "
            f"data-parallel ranks: predicted to be {statistics.median(gains):.2f} times as fast"
        )
        if worker.leads:
            worker.events.write(
                "balance", step=step, from_step=step + AHEAD, shares=[*shares],
                gradient_accumulation=new.gradient_accumulation, message=message,
                speeds=[round(one / max(speeds), 3) for one in speeds],
            )  # fmt: skip
        return [message]

    def _fits(self, layout: Layout) -> bool:
        """Whether the largest micro batch of `layout` fits on every device."""
        plan = self.worker.plan
        largest = replace(plan.layout, micro_batch=layout.micro_batch, shares=())
        return estimate_plan(self.worker.recipe, replace(plan, layout=largest)).fits
