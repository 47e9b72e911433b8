"""What an engine is: the narrow protocol that the training loop knows.

An engine owns the model, the gradients, the optimizer and their sharding. It knows
whole optimizer steps, because pipeline schedules do: the loop hands it the micro
batches of one step and gets one `StepResult` back; backward, accumulation, clipping
and the optimizer update are inside.

Every engine minimises the same number: the mean cross entropy over all unmasked
tokens of the *global* batch, so neither the number of ranks nor the split into micro
batches changes loss or gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

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

    def save_state(self, folder: Path) -> None:
        """Write this rank's share of weights, optimizer and scaler under `folder`."""
        ...

    def load_state(self, folder: Path) -> None:
        """Read back what `save_state` wrote under the same layout.

        Raises CheckpointError when the folder does not hold this engine's state.
        """
        ...

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face model folder (config and safetensors) from rank 0."""
        ...

    def close(self) -> None:
        """Release what the engine holds; the engine is not used afterwards."""
        ...
