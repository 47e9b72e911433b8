"""Compares the weights of replicas bit by bit. A flipped bit, a broken link or a
nondeterministic kernel makes them diverge silently: each continues with its own weights.
"""

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.checkpoint.store import CheckpointStore, quarantine, step_of
from toolkit.engines.base import Engine
from toolkit.errors import RunFailed
from toolkit.layout import Layout
from toolkit.train.all_ranks import on_every_rank

CHUNK = 2**22
"""Elements that are digested at a time, to limit memory."""
MIXER = 0x5851F42D4C957F2D
"""An odd number: multiplying by it loses no bit (Knuth's multiplier for 64 bits)."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of an element's size in bytes."""
OF_EXPERT = ".experts."
"""In the names of weights that expert parallel spreads over ranks with equal other weights."""

Digests = Mapping[str, int]
"""What a rank holds: a digest by name of the weight."""


class ReplicaCheck:
    """Compares the replicas of one run. `agreed_step` is the step it starts from.

    `distrust` is called on every rank with the last step that agreed, before a difference is
    reported, and returns a message about later checkpoints.
    """

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        agreed_step: int,
        distrust: Callable[[int], str],
    ) -> None:
        self.engine = engine
        layouts = [layout, *([replace(layout, ep=1)] if layout.ep > 1 else [])]
        self.parts = [[one.model_rank(r) for r in range(one.world)] for one in layouts]
        """The part of the model that each rank has (`Layout.model_rank`): of the experts, and
        of what expert parallel does not spread."""
        self.agreed_step = agreed_step
        self._distrust = distrust
        self._said_nothing_to_compare = False

    def check(self, step: int) -> str | None:
        """Compare now. Collective. Returns what should be reported, once.

        Raises RunFailed naming the ranks that differ and the first weight that differs.
        """
        digests = weight_digests(self.engine)
        kinds = [digests]
        if len(self.parts) > 1:
            experts = {name: one for name, one in digests.items() if OF_EXPERT in name}
            kinds = [experts, {k: one for k, one in digests.items() if k not in experts}]
        alone = all(len(set(parts)) == len(parts) for parts in self.parts)
        if alone or not digests:
            if self._said_nothing_to_compare:
                return None
            self._said_nothing_to_compare = True
            sharded = "the weights are sharded over the ranks"
            why = "every rank holds its own part of the model" if alone else sharded
            return f"guard.replica_check_every_steps: {why}: there is nothing to compare"
        summaries = _of_all_ranks([hash(tuple(kind.values())) for kind in kinds])
        for kind, parts, mine in zip(range(len(kinds)), self.parts, kinds, strict=True):
            of_ranks = [summary[kind] for summary in summaries]
            if len(set(zip(parts, of_ranks, strict=True))) > len(set(parts)):
                raise on_every_rank(self._failure(parts, mine, step))
        self.agreed_step = step
        return None

    def _failure(self, parts: Sequence[int], mine: Digests, step: int) -> RunFailed:
        held, hosts = _of_all_ranks(mine), _of_all_ranks(socket.gethostname())
        odd, clear = odd_ranks(parts, held)
        places = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in odd)
        differ = "weights differ between them, and there is no majority"
        if clear:
            differ = "other weights than most replicas"
        weight, advice = first_difference(parts, held), self._distrust(self.agreed_step)
        return RunFailed(
            f"step {step}: {places}: {differ}; first in {weight}",
            fix=f"suspect memory, GPU or network of these machines. Weights were last equal at "
            f"step {self.agreed_step}; {advice}",
            retry=False,  # A restart would use the same machines.
        )


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


def odd_ranks(parts: Sequence[int], held: Sequence[Digests]) -> tuple[list[int], bool]:
    """Ranks that differ from most of their replicas, and True.

    Without a majority (e.g. two replicas that differ), all of these replicas, and False.
    """
    odd: list[int] = []
    clear = True
    for part in sorted(set(parts)):
        replicas = [rank for rank, one in enumerate(parts) if one == part]
        counts = Counter(tuple(held[rank].values()) for rank in replicas)
        ((most, count),) = counts.most_common(1)
        if 2 * count > len(replicas):
            odd += [rank for rank in replicas if tuple(held[rank].values()) != most]
        else:
            odd += replicas
            clear = False
    return odd, clear


def first_difference(parts: Sequence[int], held: Sequence[Digests]) -> str:
    """Name of the first weight that differs between two replicas, in the model's order."""
    for part, mine in zip(parts, held, strict=True):
        first = held[parts.index(part)]
        for name, value in mine.items():
            if first.get(name) != value:
                return name
    raise AssertionError("asked only where replicas differ")


def set_aside_after(checkpoints: Path, agreed_step: int) -> str:
    """Rename every checkpoint after `agreed_step` to `step-N.suspect`. Returns what to do then.

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


def _of_all_ranks(value: Any) -> list[Any]:
    gathered = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
