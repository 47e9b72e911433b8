"""Files that go from the memory of one machine to that of another, over a gloo group."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
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


class _End:
    """One rank's end of a move. It continues when its file does not: the other end waits."""

    def __init__(self, move: Move, tag: int, folder: Path, files: ExitStack) -> None:
        self.size = move.size
        self.problem: OSError | None = None
        self._sends = dist.get_rank() == move.source
        self._peer = move.target if self._sends else move.source
        self._tag = tag
        try:
            opened = FileIO(folder / move.name, "rb" if self._sends else "wb")
            self._file = files.enter_context(opened)
        except OSError as error:
            self.problem = error

    def begin(self, start: int, group: dist.ProcessGroup | None) -> tuple["_End", Tensor, Any]:
        """Begin to send or receive the piece from byte `start` on."""
        piece = torch.empty(min(PIECE, self.size - start), dtype=torch.uint8)
        if not self._sends:
            return self, piece, dist.irecv(piece, self._peer, group, self._tag)
        self._do(piece, write=False)
        return self, piece, dist.isend(piece, self._peer, group, self._tag)

    def end(self, piece: Tensor) -> None:
        """End what `begin` began, which has arrived."""
        if not self._sends:
            self._do(piece, write=True)

    def _do(self, piece: Tensor, *, write: bool) -> None:
        """Read or write all of a piece, unless there was a problem before."""
        left = memoryview(piece.numpy().data)
        try:
            while left and self.problem is None:
                done = self._file.write(left) if write else self._file.readinto(left)
                if not done:
                    raise OSError(f"{self._file.name} is shorter than it was")
                left = left[done:]
        except OSError as error:
            self.problem = error


def transfer(
    moves: Sequence[Move], folder: Path, group: dist.ProcessGroup | None, at_once: int
) -> None:
    """Make these moves, of which every rank of the group names the same, piece by piece:
    `at_once` of them, in their order.

    `folder` is this rank's. Raises OSError after the last piece if a file of this rank failed.
    """
    problems = []
    for first in range(0, len(moves), at_once):
        with ExitStack() as files:
            mine = [
                _End(move, tag, folder, files)
                for tag, move in enumerate(moves[first : first + at_once])
                if dist.get_rank() in (move.source, move.target)
            ]
            for start in range(0, max((end.size for end in mine), default=0), PIECE):
                begun = [end.begin(start, group) for end in mine if start < end.size]
                for end, piece, request in begun:
                    request.wait()
                    end.end(piece)
        problems += [end.problem for end in mine if end.problem is not None]
    if problems:
        raise problems[0]
