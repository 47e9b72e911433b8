"""The input of one forward pass: the type that data, objectives, models and engines share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""Label of a position that carries no loss (PyTorch's and transformers' convention)."""
LEAST_ENDS = 32
"""Length of `MicroBatch.ends` for few documents."""


@dataclass(frozen=True)
class MicroBatch:
    """One rank's input of one forward pass."""

    input_ids: "torch.Tensor"
    """int64 [micro_batch, sequence]."""
    labels: "torch.Tensor"
    """int64 [micro_batch, sequence], already shifted: `labels[:, t]` is the token that
    follows `input_ids[:, t]`, or `IGNORE_INDEX` where no loss is taken."""
    positions: "torch.Tensor | None" = None
    """int64 [micro_batch, sequence]: the positions that the model sees, each below the sequence
    length. None stands for 0, 1, 2, … in every row. `segments`, not positions, decide which
    tokens a token attends to."""
    segments: "torch.Tensor | None" = None
    """int32 [micro_batch, sequence]: the document of each token, ascending from 0. A token
    attends to its own document only. `positions` are then given, too. They restart where a
    document begins and nowhere else. None: a row is one document."""
    extra: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    """Further inputs of the objective by name (`Objective.reads`)."""
    samples: tuple[int, ...] = ()
    """The samples of the training data that the rows are. Only the sample log reads this."""

    @cached_property
    def ends(self) -> "torch.Tensor | None":
        """Where each document begins, with all rows laid end to end, int32 [n]. The end of the
        last document fills the tail. n is 32 or more, times four as needed, so that layers
        compile for few shapes. None without segments. Computed before the copy to a GPU, which
        would make the host wait."""
        if self.segments is None:
            return None
        begins = self.segments.new_ones(self.segments.shape)
        begins[:, 1:] = self.segments.diff(dim=1)
        places = begins.flatten().nonzero().flatten()
        length = LEAST_ENDS
        while length <= len(places):
            length *= 4
        ends = places.new_full((length,), begins.numel())
        ends[: len(places)] = places
        return ends.int()

    @cached_property
    def trained(self) -> "torch.Tensor":
        """bool [micro_batch, sequence]: whether the label counts."""
        return self.labels != IGNORE_INDEX

    @property
    def tokens(self) -> int:
        """Tokens whose loss counts. Reading this waits for a batch on a GPU."""
        return int(self.trained.sum())

    def to(self, device: "torch.device") -> "MicroBatch":
        """The batch with all tensors on `device`. Copies of pinned ones may still be
        running."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "MicroBatch":
        """The batch in pinned memory. A GPU copies from it while the caller continues."""
        return self._moved(lambda tensor: tensor.pin_memory())

    def rows(self, first: int, end: int) -> "MicroBatch":
        """The rows [first, end) of this batch."""
        return self._with_each(lambda tensor: tensor[first:end])

    def _moved(self, move: "Callable[[torch.Tensor], torch.Tensor]") -> "MicroBatch":
        moved = self._with_each(move)
        if self.ends is not None:
            moved.__dict__["ends"] = move(self.ends)
        return moved

    def _with_each(self, change: "Callable[[torch.Tensor], torch.Tensor]") -> "MicroBatch":
        def changed(tensor: "torch.Tensor | None") -> "torch.Tensor | None":
            return None if tensor is None else change(tensor)

        return replace(
            self,
            input_ids=change(self.input_ids),
            labels=change(self.labels),
            positions=changed(self.positions),
            segments=changed(self.segments),
            extra={name: change(tensor) for name, tensor in self.extra.items()},
        )


def row_log_probs(log_probs: "torch.Tensor") -> "torch.Tensor":
    """Sum of log p over each row's trained tokens: fp32 [rows] from fp32 [rows, sequence].

    Rounded to fp32, because DPO's reference is kept in fp32. Where policy and reference are
    equal, their sums are then equal to the bit.
    """
    return log_probs.double().sum(dim=1).float()
