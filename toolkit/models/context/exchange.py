"""What the exchanges of attention's inputs have in common."""

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from toolkit.models.documents import Scores


class AttentionExchange(Protocol):
    """How this rank's queries meet the keys and values of other ranks."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks between which it takes place."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scores: Scores
    ) -> Tensor:
        """See `Context.attend`."""
