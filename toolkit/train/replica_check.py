"""Checks that ranks which must hold the same weights do; if not, finds the one that differs. A
bit flip, a broken link or a nondeterministic kernel lets replicas silently diverge:

each continues with its own weights. A digest per weight is compared here.
"""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.checkpoint.store import CheckpointStore, quarantine, step_of
from toolkit.engines.base import Engine
from toolkit.errors import RunFailed
from toolkit.layout import Layout
from toolkit.train.all_ranks import on_every_rank

T = TypeVar("T")

CHUNK = 2**22
"""Elements that are digested at a time, to limit memory."""
MIXER = 0x5851F42D4C957F2D
"""An odd number: multiplying by it loses no bit (Knuth's multiplier for 64 bits)."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of an element's size in bytes."""
OF_EXPERT = ".experts."
"""In the names of weights that expert parallel spreads over ranks with equal other weights."""


@dataclass(frozen=True)
class Holding:
    """What one rank holds."""

    model_rank: int
    """See `Layout.model_rank`."""
    host: str
    digests: dict[str, int]
    """By name of the weight."""


class ReplicaCheck:
    """Compares the replicas of one run. `agreed_step` is the step it starts from.

    `distrust` is called on every rank with the last step that agreed, before a difference is
    reported, and returns a message about later checkpoints.
    """

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        rank: int,
        agreed_step: int,
        distrust: Callable[[int], str],
    ) -> None:
        self.engine = engine
        layouts = [layout, *([replace(layout, ep=1)] if layout.ep > 1 else [])]
        self.model_ranks = [[one.model_rank(r) for r in range(one.world)] for one in layouts]
        """Of each rank: for experts, and for what expert parallel does not spread."""
        self.rank = rank
        self.agreed_step = agreed_step
        self._distrust = distrust
        self._said_nothing_to_compare = False

    def check(self, step: int) -> str | None:
        """Compare now; collective. Returns what should be reported, once.

        Raises RunFailed naming the ranks that differ and the first weight that differs.
        """
        digests = weight_digests(self.engine)
        kinds = [digests]
        if len(self.model_ranks) > 1:
            experts = {name: one for name, one in digests.items() if OF_EXPERT in name}
            kinds = [experts, {k: one for k, one in digests.items() if k not in experts}]
        alone = all(len(set(parts)) == len(parts) for parts in self.model_ranks)
        if alone or not digests:
            if self._said_nothing_to_compare:
                return None
            self._said_nothing_to_compare = True
            sharded = "the weights are sharded over the ranks"
            why = "every rank holds its own part of the model" if alone else sharded
            return f"guard.replica_check_every_steps: {why}: there is nothing to compare"
        summaries = _gather([hash(tuple(kind.values())) for kind in kinds])
        for parts, mine, of_ranks in zip(
            self.model_ranks, kinds, zip(*summaries, strict=True), strict=True
        ):
            if len(set(zip(parts, of_ranks, strict=True))) > len(set(parts)):
                holding = Holding(parts[self.rank], socket.gethostname(), mine)
                holdings = _gather(holding)
                advice = self._distrust(self.agreed_step)
                raise on_every_rank(_failure(holdings, step, self.agreed_step, advice))
        self.agreed_step = step
        return None


def weight_digests(engine: Engine) -> dict[str, int]:
    """A digest of every weight that this rank holds as completely as its replicas."""
    named = [(name, digest(weight)) for name, weight in engine.replicated_weights()]
    if not named:
        return {}
    values = torch.stack([value for _, value in named]).tolist()
    return {name: value for (name, _), value in zip(named, values, strict=True)}


@torch.no_grad()
def digest(weight: Tensor) -> Tensor:
    """Digest of a tensor's bits and their order: int64 scalar on its device.

    A sum of the elements as integers, multiplied by odd numbers that depend on their position:
    a single flipped bit always changes the digest.
    """
    elements = weight.reshape(-1).view(BITS[weight.element_size()])
    places = torch.arange(min(len(elements), CHUNK), device=weight.device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for chunk in torch.split(elements, CHUNK):
        total = total * MIXER + (chunk.long() * places[: len(chunk)]).sum()
    return total


def odd_ranks(holdings: Sequence[Holding]) -> tuple[list[int], bool]:
    """Ranks that differ from most of their replicas, and True.

    Without a majority (e.g. two replicas that differ), all of these replicas, and False.
    """
    odd: list[int] = []
    clear = True
    for model_rank in sorted({holding.model_rank for holding in holdings}):
        replicas = [r for r, held in enumerate(holdings) if held.model_rank == model_rank]
        held = {rank: tuple(holdings[rank].digests.values()) for rank in replicas}
        (most_held, count), *_ = Counter(held.values()).most_common()
        if 2 * count > len(replicas):
            odd += [rank for rank in replicas if held[rank] != most_held]
        else:
            odd += replicas
            clear = False
    return odd, clear


def first_difference(holdings: Sequence[Holding]) -> str:
    """Name of the first weight that differs between two replicas, in the model's order."""
    seen: dict[tuple[int, str], int] = {}
    for holding in holdings:
        for name, value in holding.digests.items():
            if seen.setdefault((holding.model_rank, name), value) != value:
                return name
    raise AssertionError("asked only where replicas differ")


def set_aside_after(checkpoints: Path, agreed_step: int) -> str:
    """Rename every checkpoint after `agreed_step` to `step-N.suspect`; returns what to do then.

    A start could not detect a corrupt checkpoint, because all replicas are loaded from it.
    """
    folders = CheckpointStore(checkpoints, keep=1).finished()
    suspect = [folder for folder in folders if step_of(folder) > agreed_step]
    try:
        for folder in suspect:
            quarantine(folder, "suspect")
    except OSError as error:
        return f"move checkpoints after it away yourself ({error}) before you start again"
    renamed = ", ".join(path.name for path in suspect)
    said = f"{renamed} got the ending .suspect: saved since then; " if suspect else ""
    if suspect and suspect == folders:
        return f"{said}no checkpoint is left from before: start again in another directory"
    return f"{said}start the same command again"


def _failure(
    holdings: Sequence[Holding], step: int, agreed_step: int, advice: str
) -> RunFailed:
    odd, clear = odd_ranks(holdings)
    places = ", ".join(f"rank {rank} ({holdings[rank].host})" for rank in odd)
    if clear:
        differ = f"{places}: other weights than most replicas"
    else:
        differ = f"{places}: weights differ between them, and there is no majority"
    return RunFailed(
        f"step {step}: {differ}; first in {first_difference(holdings)}",
        fix=f"suspect memory, GPU or network of these machines. Weights were last equal at "
        f"step {agreed_step}; {advice}",
        retry=False,  # A restart would use the same machines.
    )


def _gather(value: T) -> list[T]:
    """`value` of every rank."""
    gathered = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
