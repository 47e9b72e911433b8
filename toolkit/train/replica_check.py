"""Compares the weights of replicas bit by bit. A flipped bit, a broken link or a
nondeterministic kernel makes them diverge silently: each continues with its own weights.
"""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
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

        Raises RunFailed naming the ranks that differ.
        """
        digests = self._digests()
        if digests is None:
            if self._said_nothing_to_compare:
                return None
            self._said_nothing_to_compare = True
            return (
                "guard.replica_check_every_steps: every rank holds its own part of the model: "
                "there is nothing to compare"
            )
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, (digests, socket.gethostname()))
        for kind, parts in enumerate(self.parts):
            odd, clear = odd_ranks(parts, [held[kind] for held, _ in everyones])
            if odd:
                places = ", ".join(f"rank {rank} ({everyones[rank][1]})" for rank in odd)
                raise on_every_rank(self._failure(step, places, clear))
        self.agreed_step = step
        return None

    def _digests(self) -> list[int] | None:
        """A digest of the weights that each of `parts` compares. None if no rank holds what
        another one holds."""
        weights = [*self.engine.replicated_weights()]
        if not weights or all(len(set(parts)) == len(parts) for parts in self.parts):
            return None
        values = torch.stack([digest(weight) for _, weight in weights]).tolist()
        kinds: list[list[int]] = [[] for _ in self.parts]
        for (name, _), value in zip(weights, values, strict=True):
            kinds[0 if OF_EXPERT in name else -1].append(value)
        return [hash(tuple(kind)) for kind in kinds]

    def _failure(self, step: int, places: str, clear: bool) -> RunFailed:
        differ = "weights differ between them, and there is no majority"
        if clear:
            differ = "other weights than most replicas"
        return RunFailed(
            f"step {step}: {places}: {differ}",
            fix=f"suspect memory, GPU or network of these machines. Weights were last equal at "
            f"step {self.agreed_step}; {self._distrust(self.agreed_step)}",
            retry=False,  # A restart would use the same machines.
        )


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


def odd_ranks(parts: Sequence[int], held: Sequence[int]) -> tuple[list[int], bool]:
    """Ranks that hold something else than most of their replicas, and True.

    Without a majority (e.g. two replicas that differ), all of these replicas, and False.
    """
    odd: list[int] = []
    clear = True
    for part in sorted(set(parts)):
        replicas = [rank for rank, one in enumerate(parts) if one == part]
        ((most, count),) = Counter(held[rank] for rank in replicas).most_common(1)
        if 2 * count > len(replicas):
            odd += [rank for rank in replicas if held[rank] != most]
        else:
            odd += replicas
            clear = False
    return odd, clear


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
