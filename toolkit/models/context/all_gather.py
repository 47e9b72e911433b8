"""Every rank has the keys and values of whole rows. Any number of heads."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.models.context.collectives import gathered
from toolkit.models.context.runs import bounds, natural, run_ends
from toolkit.models.documents import Scores, attend


@dataclass(frozen=True)
class AllGather:
    """All-gather of keys and values; their gradients are summed by a reduce-scatter."""

    group: dist.ProcessGroup

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scores: Scores
    ) -> Tensor:
        """See `Context.attend`."""
        keys, values = (natural(gathered(x, self.group, summed=True)) for x in (key, value))
        length = keys.shape[1]
        runs = bounds(length, self.group.rank(), self.group.size())
        return torch.cat(
            [
                attend(of_run, keys, values, *run_ends(ends, length, first, end), scores)
                for of_run, (first, end) in zip(query.chunk(2, dim=1), runs, strict=True)
            ],
            dim=1,
        )
