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
from toolkit.layout import Layout, head_ranks
from toolkit.models.context.all_gather import AllGather
from toolkit.models.context.collectives import gathered, own_group
from toolkit.models.context.exchange import AttentionExchange
from toolkit.models.context.ring import Ring
from toolkit.models.context.runs import natural, own
from toolkit.models.context.ulysses import Ulysses
from toolkit.models.documents import Scores


def exchange_of(layout: Layout, group: dist.ProcessGroup, key_heads: int) -> AttentionExchange:
    """The layout's exchange in this rank's context group, for keys and values of so many heads
    on a rank; collective among all ranks.

    Nested: ulysses in groups of consecutive ranks, rings of those in equal places. The runs of
    a group's ranks adjoin: each group has two runs of a row, as a rank of the ring needs them.
    """
    if layout.exchange == "all_gather":
        return AllGather(group)
    inside = head_ranks(layout.exchange, layout.cp, key_heads)
    if inside in (1, layout.cp):
        return Ring(group) if inside == 1 else Ulysses(group)
    groups = layout.context_groups
    near = [
        one[first : first + inside] for one in groups for first in range(0, layout.cp, inside)
    ]
    far = [one[first::inside] for one in groups for first in range(inside)]
    return Ulysses(own_group(near), between=Ring(own_group(far)))


@dataclass(frozen=True)
class Context:
    """One rank's context group."""

    group: dist.ProcessGroup
    exchange: AttentionExchange
    made: tuple[dist.ProcessGroup, ...] = ()
    """Groups that exist for it alone."""

    @classmethod
    def of(cls, layout: Layout, key_heads: int) -> "Context":
        """This rank's group, as `Layout.data_rank` numbers them; collective among all ranks.

        `key_heads`: of keys and values, on one tensor-parallel rank.
        """
        group = own_group(layout.context_groups)
        context = cls.over(group, layout, key_heads)
        return replace(context, made=(group, *context.made))

    @classmethod
    def over(cls, group: dist.ProcessGroup, layout: Layout, key_heads: int) -> "Context":
        """The same in this rank's group, which exists; collective among all ranks."""
        kind = exchange_of(layout, group, key_heads)
        between = kind.between if isinstance(kind, Ulysses) else None
        return cls(group, kind, () if between is None else (kind.group, between.group))

    def close(self) -> None:
        """Destroy the groups that were made for it, the last one first; on every rank."""
        for group in reversed(self.made):
            dist.destroy_process_group(group)

    @property
    def degree(self) -> int:
        """Over how many ranks a row is spread."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.group.rank()

    def part(self, batch: MicroBatch) -> MicroBatch:
        """This rank's positions of `batch`, for the model alone: objectives take whole rows.

        They keep their numbers in the row or the document. `segments` are left out: attention
        gets the `ends` of whole rows.
        """
        ids, positions = batch.input_ids, batch.positions
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        weights = batch.loss_weights
        return replace(
            batch,
            input_ids=self.own(ids),
            labels=self.own(batch.labels),
            loss_weights=None if weights is None else self.own(weights),
            positions=self.own(positions),
            segments=None,
        )

    def own(self, rows: Tensor) -> Tensor:
        """This rank's positions of [rows, length, …]."""
        return own(rows, self.rank, self.degree)

    def whole(self, log_probs: Tensor) -> Tensor:
        """[rows, own positions] of every rank → [rows, length] in natural order.

        Every rank has the loss of whole rows, so that backward takes this rank's part of the
        gradient and sums nothing.
        """
        return natural(gathered(log_probs, self.group, summed=False))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scores: Scores
    ) -> Tensor:
        """Causal attention of this rank's positions inside the documents of whole rows:
        [batch, own, heads, size], keys and values of [batch, own, groups, size] → [batch, own,
        heads, size of values].

        `ends`: as `MicroBatch.ends`, of whole rows; row boundaries where a row is a document.
        """
        return self.exchange.attend(query, key, value, ends, scores)
