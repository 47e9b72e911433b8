"""Work on several ranks: a failure on one ends all, with one message."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from toolkit.engines.distributed import Ranks
from toolkit.errors import EXIT_DONE, EXIT_FAILED, DmtError
from toolkit.train.watchdog import WAITING, Mark

Result = TypeVar("Result")

PREPARATION_TIMEOUT = timedelta(days=1)
"""Timeout of ranks that wait for one that tokenises data or compiles an operator."""


class PeerFailed(DmtError):
    """Another rank failed and has already reported its error. This one only exits."""

    exit_code = EXIT_FAILED

    def __init__(self, code: int) -> None:
        super().__init__("another rank failed")
        self.code = code


def on_every_rank(error: DmtError) -> DmtError:
    """The exception to raise for an error that all ranks found: the error itself on rank 0
    only."""
    mine = not dist.is_initialized() or dist.get_rank() == 0
    return error if mine else PeerFailed(error.exit_code)


class AllRanks:
    """Agreement between all ranks about whether the last action worked."""

    def __init__(self, ranks: Ranks, mark: Mark) -> None:
        self.ranks = ranks
        self._mark = mark
        self.group = dist.new_group(backend="gloo", timeout=PREPARATION_TIMEOUT)

    def run(self, action: Callable[[], Result]) -> Result:
        """Run `action` on every rank.

        Raises its DmtError on the first rank that has one, PeerFailed on all others, so that
        the user sees one message even if every rank finds the mistake.
        """
        error: DmtError | None = None
        try:
            result = action()
        except DmtError as raised:
            error = raised
        if self.ranks.world > 1:
            self._mark(WAITING)
        codes: list[int] = [EXIT_DONE] * self.ranks.world
        mine = EXIT_DONE if error is None else error.exit_code
        dist.all_gather_object(codes, mine, group=self.group)
        for rank, code in enumerate(codes):
            if rank == self.ranks.rank and error is not None:
                raise error
            if code != EXIT_DONE:
                raise PeerFailed(code)
        return result

    def rank_zero(self, action: Callable[[], Result]) -> Result:
        """Run `action` on rank 0 and hand its (picklable) result to every rank."""
        made = self.run(lambda: action() if self.ranks.rank == 0 else None)
        box: list[object] = [made]
        dist.broadcast_object_list(box, group=self.group)
        return box[0]  # type: ignore[return-value]

    def leaders_first(self, action: Callable[[], Result]) -> Result:
        """Run `action` once per machine before the other ranks of that machine run it.

        For work whose result is cached on disk, where the other ranks find it.
        """
        leader = self.ranks.local_rank == 0
        first = self.run(lambda: action() if leader else None)
        second = self.run(lambda: None if leader else action())
        return first if leader else second  # type: ignore[return-value]
