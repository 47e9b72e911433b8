"""Two real ranks that train a made-up state and save it as the product does.

A start takes a fraction of a second, so that every fault of a save can be tried on every rank.
"""

import json
import os
import signal
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.checkpoint.conftest import MANIFEST
from tests.forked import ForkedRanks
from tests.processes import HANG_S
from toolkit.checkpoint.resume import find_newest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.saver import SaveOutcome, Saver
from toolkit.checkpoint.shards import QUANTITIES, StateShard, cut, whole_block
from toolkit.checkpoint.store import CheckpointStore
from toolkit.engines.distributed import join

WORLD = 2
STEPS = 8
EVERY_STEPS = 2
KEEP = 2
COMPANIONS = {"hf/config.json": b"{}\n"}


@dataclass(frozen=True)
class Start:
    """One start of the run that lives in `folder`."""

    folder: Path
    asynchronous: bool
    faults: str = ""
    """DMT_FAILPOINTS."""


@dataclass(frozen=True)
class Told:
    """What one rank has to tell of a run that it finished."""

    resumed_at: int
    skipped: tuple[str, ...]
    problems: tuple[tuple[int, str], ...]
    """Steps that could not be saved, and why."""
    complaints: tuple[tuple[int, str], ...]
    state: str
    """Hash of this rank's state at the end."""


def run(start: Start) -> tuple[list[int | None], list[Told]]:
    """Exit codes of the ranks, and what each tells if all of them came to the end.

    Fails when a rank hangs.
    """
    codes = ForkedRanks(_rank, [start], WORLD, start.folder).end()
    done = codes == [0] * WORLD
    return codes, [_read(start.folder, rank) for rank in range(WORLD)] if done else []


def _read(folder: Path, rank: int) -> Told:
    told = json.loads((folder / f"told-{rank}.json").read_text())
    pairs = {key: tuple(map(tuple, told[key])) for key in ("problems", "complaints")}
    return Told(**told | pairs | {"skipped": tuple(told["skipped"])})


def _rank(start: Start) -> int:
    """One rank, from the newest checkpoint to the last step."""
    os.environ["DMT_FAILPOINTS"] = start.faults
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # does not end a rank of the product
    rank = join(timedelta(seconds=HANG_S)).rank
    told = _train(rank, start)
    (start.folder / f"told-{rank}.json").write_text(json.dumps(asdict(told)))
    dist.barrier()
    return 0


def _train(rank: int, start: Start) -> Told:
    store = CheckpointStore(start.folder / "checkpoints", KEEP)
    saver = Saver(store, asynchronous=start.asynchronous)
    shard = part_of_the_state(rank)
    found = find_newest(store, expected=False)
    if found is not None:
        SavedState(found.folder).load(shard)
    resumed_at = 0 if found is None else found.manifest.step
    outcomes: list[SaveOutcome | None] = []
    for step in range(resumed_at + 1, STEPS + 1):
        train_step(shard, step)
        outcomes.append(saver.finished())
        if step % EVERY_STEPS == 0:
            outcomes.append(saver.finished(wait=True))
            saver.save(replace(MANIFEST, step=step), [shard], COMPANIONS)
    outcomes.append(saver.finished(wait=True))
    saver.close()
    groups = len(distributed_c10d._world.pg_map)
    assert groups == 1, "each group has a socket to every other rank"
    return Told(
        resumed_at,
        () if found is None else found.skipped,
        tuple((s.manifest.step, s.problem) for s in outcomes if s and s.problem),
        tuple((s.manifest.step, s.complaint) for s in outcomes if s and s.complaint),
        hash_of(shard),
    )


def hash_of(shard: StateShard) -> str:
    """Of its values."""
    return sha256(
        b"".join(shard.get(name).numpy().tobytes() for name in QUANTITIES)
    ).hexdigest()


def part_of_the_state(rank: int) -> StateShard:
    """A rank's part, which begins and ends in the middle of a row."""
    whole = whole_block("matrix", (7, 5))
    bounds = [7 * 5 * one // WORLD for one in range(WORLD + 1)]
    blocks = cut([whole], bounds[rank], bounds[rank + 1])
    length = bounds[rank + 1] - bounds[rank]
    values: dict[str, Any] = {name: torch.zeros(length) for name in QUANTITIES}
    return StateShard(blocks, values, saved_here=True)


def train_step(shard: StateShard, step: int) -> None:
    """Change every value, by what it was and by what the other rank holds."""
    for number, name in enumerate(QUANTITIES):
        values = shard.get(name)
        total = values.sum().reshape(1)
        dist.all_reduce(total)
        places = torch.arange(values.numel())
        values.mul_(0.9).add_(torch.sin(places * 0.1 + step + number) + total * 1e-6)
