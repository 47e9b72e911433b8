"""What an engine is: the narrow protocol that the training loop knows.

An engine owns the model, the gradients, the optimizer and their sharding. It knows
whole optimizer steps, because pipeline schedules do: the loop hands it the micro
batches of one step and gets one `StepResult` back; backward, accumulation, clipping
and the optimizer update are inside.

Every engine minimises the same number: the mean cross entropy over all unmasked
tokens of the *global* batch, so neither the number of ranks nor the split into micro
batches changes loss or gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from toolkit.checkpoint.shards import StateShard

IGNORE_INDEX = -100
"""Label of a position that carries no loss (PyTorch's and transformers' convention)."""


@dataclass(frozen=True)
class MicroBatch:
    """What one rank feeds to one forward pass."""

    input_ids: "torch.Tensor"
    """int64 [micro_batch, sequence]."""
    labels: "torch.Tensor"
    """int64 [micro_batch, sequence], already shifted: `labels[:, t]` is the token that
    follows `input_ids[:, t]`, or `IGNORE_INDEX` where no loss is taken."""
    samples: tuple[int, ...] = ()
    """Which samples of the training data the rows are; for the sample log only."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, equal on every rank."""

    loss: float
    """Mean cross entropy (nats) over the unmasked tokens of the global batch."""
    grad_norm: float
    """Global L2 norm of the gradients before clipping."""
    tokens: int
    """Unmasked tokens of the global batch."""
    skipped: bool = False
    """True when the update was skipped because of non-finite gradients (fp16 scaling)."""


@dataclass(frozen=True)
class EvalResult:
    """Validation loss, equal on every rank."""

    loss: float
    """Mean cross entropy (nats) over all unmasked tokens of all ranks' batches."""
    tokens: int
    """Unmasked tokens that it was taken over."""


@dataclass(frozen=True)
class Counters:
    """The numbers beside the optimizer's tensors."""

    optimizer_steps: int
    """Updates made, skipped ones left out: what AdamW's bias correction counts."""
    loss_scale: dict[str, Any] | None = None
    """Under fp16: the `scale`, and under `detail` what its own scaler counts."""


class Engine(Protocol):
    """A model that trains. Every method is collective: all ranks call it together."""

    def train_step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> StepResult:
        """Run one optimizer step over this rank's micro batches of the global batch.

        `learning_rate` is the rate of this step. Every rank passes the same number of
        micro batches; their unmasked token counts may differ, down to zero.
        """
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Loss over this and all other ranks' batches, without gradients."""
        ...

    def state(self) -> "Iterator[StateShard]":
        """This rank's elements of the training state: fp32 weights and Adam's moments.

        What is put into them counts from the next step on. The weights that the model
        computes with do not follow: an engine that continues is built with them.
        """
        ...

    def counters(self) -> Counters:
        """What else of the optimizer a checkpoint must hold; equal on every rank."""
        ...

    def set_counters(self, counters: Counters) -> None:
        """Continue counting where `counters` stand."""
        ...

    def close(self) -> None:
        """Release what the engine holds; the engine is not used afterwards."""
        ...
