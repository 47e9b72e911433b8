"""Files that go from the memory of one machine to that of another, over a gloo group.

They are mapped: gloo reads and writes the pages of the tmpfs.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PIECE = 1 << 24
"""Bytes of a file that are on their way at a time."""


@dataclass(frozen=True)
class Move:
    """A file that one rank sends to another; both have it under this name in their folders."""

    name: str
    size: int
    """Bytes."""
    source: int
    target: int


def open_files(moves: Sequence[Move], folder: Path) -> dict[int, Tensor]:
    """This rank's files in its `folder`, uint8 [size], by the number of the move. Raises
    OSError, also where a new one has no room: whoever writes to a mapped one is killed then."""
    files, rank = {}, dist.get_rank()
    for number, move in enumerate(moves):
        path = folder / move.name
        if rank == move.target:
            with path.open("wb") as new:
                os.posix_fallocate(new.fileno(), 0, move.size)
        if rank in (move.source, move.target):
            if path.stat().st_size != move.size:
                raise OSError(f"{path} is shorter than it was")
            mapped = torch.from_file(str(path), shared=True, size=move.size, dtype=torch.uint8)
            files[number] = mapped
    return files


def transfer(
    moves: Sequence[Move],
    files: Mapping[int, Tensor],
    group: dist.ProcessGroup | None,
    tick: Callable[[int], None],
) -> None:
    """Make these moves, of which every rank of the group names the same, piece by piece.

    `tick` gets the size of each piece when all ranks have theirs: one with small files hears
    that a large one is on its way.
    """
    for start in range(0, max((move.size for move in moves), default=0), PIECE):
        begun: list[Any] = []
        for number, file in files.items():
            move, piece = moves[number], file[start : start + PIECE]
            if dist.get_rank() == move.source and len(piece):
                begun.append(dist.isend(piece, move.target, group, number))
            elif len(piece):
                begun.append(dist.irecv(piece, move.source, group, number))
        for request in begun:
            request.wait()
        dist.barrier(group)
        tick(PIECE)
