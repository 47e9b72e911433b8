"""Every rank attends with a part of the heads, at the positions of all."""

from dataclasses import dataclass
from math import lcm

import torch.distributed as dist
from torch import Tensor

from toolkit.models.context.collectives import exchanged
from toolkit.models.context.exchange import AttentionExchange
from toolkit.models.context.runs import natural, shares
from toolkit.models.documents import Scores, attend


@dataclass(frozen=True)
class Ulysses:
    """All-to-all from positions to heads and back (arXiv:2309.14509)."""

    group: dist.ProcessGroup
    between: AttentionExchange | None = None
    """Of the groups that have the other positions; None: this group has all."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scores: Scores
    ) -> Tensor:
        """See `Context.attend`. Heads of keys and values are repeated where they are fewer
        than ranks."""
        ranks, groups = self.group.size(), key.shape[2]
        assert query.shape[2] % ranks == 0, "refused at check"
        if times := lcm(groups, ranks) // groups - 1:
            key, value = (x.repeat_interleave(times + 1, dim=2) for x in (key, value))
        q, k, v = (self._positions_of_some_heads(x) for x in (query, key, value))
        scores = scores.of_heads(self.group.rank(), ranks)
        if self.between is None:
            mine = attend(q, k, v, ends, ends, scores)
        else:
            mine = self.between.attend(q, k, v, ends, scores)
        returned = exchanged(shares(mine, ranks), self.group)
        return returned.movedim(0, 2).flatten(2, 3)

    def _positions_of_some_heads(self, x: Tensor) -> Tensor:
        """[batch, own, heads, size] → [batch, positions of all ranks, heads / ranks, size]."""
        by_rank = x.unflatten(2, (self.group.size(), -1)).movedim(2, 0)  # type: ignore[no-untyped-call]
        return natural(exchanged(by_rank, self.group))
