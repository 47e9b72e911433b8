"""Context parallel: each rank of a group computes some positions of every row.

Only attention looks at other positions: an exchange brings keys and values, or heads, to the
ranks that need them. The log-probabilities are gathered afterwards, so that every rank computes
the same loss of whole rows and no objective knows of the split.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.batch import MicroBatch
from toolkit.layout import Exchange, Layout
from toolkit.models.context.exchanges import ATTENTION, gathered, natural, own, own_group
from toolkit.models.documents import Scores


@dataclass(frozen=True)
class Context:
    """One rank's context group."""

    group: dist.ProcessGroup
    exchange: Exchange

    @classmethod
    def of(cls, layout: Layout) -> "Context":
        """Make this rank's group of `layout.context_groups`. Collective among all ranks."""
        return cls(own_group(layout.context_groups), layout.exchange)

    def close(self) -> None:
        """Destroy the group that `of` made, on every rank."""
        dist.destroy_process_group(self.group)

    @property
    def degree(self) -> int:
        """Number of ranks over which a row is spread."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.group.rank()

    def part(self, batch: MicroBatch) -> MicroBatch:
        """This rank's positions of `batch`, for the model alone: objectives take whole rows.

        Positions keep their numbers in the row or the document. `segments` are left out, since
        attention gets the `ends` of whole rows.
        """
        ids, positions = batch.input_ids, batch.positions
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return replace(
            batch,
            input_ids=self.own(ids),
            labels=self.own(batch.labels),
            positions=self.own(positions),
            segments=None,
        )

    def own(self, rows: Tensor) -> Tensor:
        """This rank's positions of [rows, length, …]."""
        return own(rows, self.rank, self.degree)

    def whole(self, log_probs: Tensor) -> Tensor:
        """Gathers [rows, own positions] of every rank into [rows, length], in natural order.

        Every rank computes the same loss. Backward keeps this rank's part of the gradient and
        does not sum over ranks.
        """
        return natural(gathered(log_probs, self.group, summed=False))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scores: Scores
    ) -> Tensor:
        """Causal attention of this rank's positions inside the documents of whole rows:
        [batch, own, heads, size], keys and values of [batch, own, groups, size] → [batch, own,
        heads, size of values].

        `ends`: as `MicroBatch.ends`, of whole rows. Row boundaries where a row is a document.
        """
        return ATTENTION[self.exchange](query, key, value, ends, scores, self.group)
