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
    loss_weights: "torch.Tensor | None" = None
    """float32 [micro_batch, sequence], not negative: how much the loss of a label counts. None:
    1 for every label. A label that is `IGNORE_INDEX` counts nothing, whatever its weight."""
    positions: "torch.Tensor | None" = None
    """int64 [micro_batch, sequence], each below the sequence length: the positions that the
    model sees. None: 0, 1, 2, … in every row. Which tokens a token attends to does not depend
    on them, but on `segments`."""
    segments: "torch.Tensor | None" = None
    """int32 [micro_batch, sequence]: the document of each token, which attends to no other;
    ascending from 0. `positions` are then given, too, and restart where a document begins and
    nowhere else. None: a row is one document."""
    extra: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    """What else the objective reads, by name (`Objective.reads`)."""
    samples: tuple[int, ...] = ()
    """Which samples of the training data the rows are; for the sample log only."""

    @cached_property
    def ends(self) -> "torch.Tensor | None":
        """int32 [n]: in the rows one after the other, where each document of `segments` begins,
        and then where the last one ends, up to a power of four: layers are compiled for few
        shapes. None without segments. Counted before a batch is copied to a GPU, which would
        make the host wait."""
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
        """Unmasked tokens: those whose loss counts. Waits for a batch on a GPU."""
        return int(self.trained.sum())

    def to(self, device: "torch.device") -> "MicroBatch":
        """The batch with all its tensors on `device`; pinned ones are copied meanwhile."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "MicroBatch":
        """The batch in pinned memory, from which a GPU copies while the caller continues."""
        return self._moved(lambda tensor: tensor.pin_memory())

    def rows(self, first: int, end: int) -> "MicroBatch":
        """Rows [first, end) of it."""
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
            loss_weights=changed(self.loss_weights),
            positions=changed(self.positions),
            segments=changed(self.segments),
            extra={name: change(tensor) for name, tensor in self.extra.items()},
        )


def row_log_probs(log_probs: "torch.Tensor") -> "torch.Tensor":
    """log p of the trained tokens of each row together: fp32 [rows] from fp32 [rows, sequence].

    Rounded to fp32, in which those of DPO's reference are kept: where policy and reference are
    equal, so are these, to the bit.
    """
    return log_probs.double().sum(dim=1).float()
