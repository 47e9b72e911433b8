"""What an engine is: the narrow protocol that the training loop knows.

An engine owns the model, the gradients, the optimizer and their sharding. It knows
whole optimizer steps, because pipeline schedules do: the loop hands it the micro
batches of one step and gets one `StepResult` back; backward, accumulation, clipping
and the optimizer update are inside.

Every engine minimises the same number: the mean cross entropy over all unmasked
tokens of the *global* batch, so neither the number of ranks nor the split into micro
batches changes loss or gradients.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from toolkit.batch import MicroBatch
    from toolkit.checkpoint.shards import StateShard


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, equal on every rank."""

    loss: float
    """Mean cross entropy (nats) over the unmasked tokens of the global batch; NaN when it has
    none, which skips the step."""
    grad_norm: float
    """Global L2 norm of the gradients before clipping; means nothing in a skipped step."""
    tokens: int
    """Unmasked tokens of the global batch."""
    skipped: str | None = None
    """Why the update was skipped, in words; None when it was done."""


NON_FINITE_GRADIENTS = "the gradients are not finite"


def refusal(tokens: float, loss: float, max_loss: float, grad_norm: float = 0.0) -> str | None:
    """Why a global batch of so many unmasked tokens, with this loss and gradient, must be
    skipped; None when it is learned from."""
    if not tokens:
        return "no token of the batch is trained"
    if not math.isfinite(loss):
        return "the loss is not finite"
    if loss > max_loss:
        return f"the loss is above {max_loss:.6g}"
    return None if math.isfinite(grad_norm) else NON_FINITE_GRADIENTS


@dataclass(frozen=True)
class EvalResult:
    """Validation loss, equal on every rank."""

    loss: float
    """Mean cross entropy (nats) over all unmasked tokens of all ranks' batches; NaN when there
    are none."""
    tokens: int
    """Unmasked tokens that it was taken over."""


@dataclass(frozen=True)
class Counters:
    """The numbers besides the optimizer's tensors."""

    optimizer_steps: int
    """Updates made, skipped ones left out: what AdamW's bias correction counts."""
    loss_scale: dict[str, Any] | None = None
    """Under fp16: the `scale`, and under `detail` what its own scaler counts."""


class Engine(Protocol):
    """A model that trains. Every method is collective: all ranks call it together."""

    def train_step(
        self,
        micro_batches: "Sequence[MicroBatch]",
        tokens: int,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        """Run one optimizer step over this rank's micro batches of the global batch.

        `tokens` are the unmasked tokens of the global batch, which the loop counted over all
        ranks while the step before ran. `learning_rate` is the rate of this step. Every rank
        passes the same number of micro batches; their unmasked token counts may differ, down
        to zero.

        All ranks skip the update alike when the global batch has no unmasked token, when its
        loss is not finite or above `max_loss`, or when a gradient of any rank is not finite. A
        skipped step leaves weights, moments and step counts as they were, to the bit; of the
        engine's state only fp16's loss scale may change, and only for gradients.
        """
        ...

    def evaluate(self, micro_batches: "Sequence[MicroBatch]") -> EvalResult:
        """Loss over this and all other ranks' batches, without gradients."""
        ...

    def replicated_weights(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Names and compute weights that this rank holds as completely as its replicas.

        Its replicas are the ranks of equal `Layout.model_rank`. Nothing where the weights
        are sharded over them (ZeRO-3). Not collective.
        """
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
