"""The engine protocol: the narrow interface that the training loop uses.

An engine owns the model, the gradients, the optimizer and their sharding. Its unit is a whole
optimizer step, as in pipeline schedules: the loop passes it the micro batches of one step and
gets one `StepResult` back. Backward, accumulation, clipping and the optimizer update happen
inside.

Every engine minimises the same number: the summed loss of the objective
(`toolkit.objectives`) over the *global* batch, divided by its global count. So neither the
number of ranks nor the split into micro batches changes loss or gradients. An engine computes
the log-probability of every label and does not know the objective.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from toolkit.batch import MicroBatch
    from toolkit.checkpoint.shards import StateShard


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, equal on every rank."""

    loss: float
    """Loss of the global batch over its count. NaN when that is 0, which skips the step."""
    grad_norm: float
    """Global L2 norm of the gradients before clipping. Meaningless in a skipped step."""
    skipped: str | None = None
    """Why the update was skipped. None if it was applied."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The objective's metrics of the global batch, over its count."""


NON_FINITE_GRADIENTS = "the gradients are not finite"


def refusal(count: float, loss: float, max_loss: float, grad_norm: float = 0.0) -> str | None:
    """Why a global batch with this count, loss and gradient must be skipped. None if it is
    applied."""
    if not count:
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
    """Loss of all ranks' batches over their count. NaN when that is 0."""
    tokens: int
    """Their unmasked tokens."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The objective's metrics, over the same count."""


@dataclass(frozen=True)
class Counters:
    """Scalars of the optimizer's state, in addition to its tensors."""

    optimizer_steps: int
    """Applied updates, without skipped ones: the count of AdamW's bias correction."""
    loss_scale: dict[str, Any] | None = None
    """With fp16: the `scale`, and in `detail` the counts of the engine's own scaler."""


class Engine(Protocol):
    """A model that trains. Every method is collective: all ranks call it together."""

    def train_step(
        self,
        micro_batches: "Sequence[MicroBatch]",
        count: float,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        """Run one optimizer step over this rank's micro batches of the global batch.

        `count` is the objective's count of the global batch, which the loop summed over all
        ranks during the previous step. `learning_rate` is the rate of this step. Every rank
        passes the same number of micro batches. Their counts may differ, down to zero.

        All ranks skip the update when the count of the global batch is 0, when its loss is not
        finite or above `max_loss`, or when a gradient of any rank is not finite. A skipped step
        leaves weights, moments and step counts bitwise unchanged. Only fp16's loss scale may
        change, and only because of non-finite gradients.
        """

    def evaluate(self, micro_batches: "Sequence[MicroBatch]") -> EvalResult:
        """Loss over this and all other ranks' batches, without gradients."""

    def sequence_log_probs(self, micro_batches: "Sequence[MicroBatch]") -> "torch.Tensor":
        """Sum of log p over the trained tokens of each row, without gradients.

        fp32 [rows of all this rank's micro batches], on the CPU. Every rank passes the same
        number of micro batches.
        """

    def replicated_weights(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Names and compute weights that this rank holds as completely as its replicas.

        Its replicas are the ranks with the same `Layout.model_rank`. Empty if the weights are
        sharded over them (ZeRO-3).
        """

    def state(self) -> "Iterator[StateShard]":
        """This rank's elements of the training state: fp32 weights and Adam's moments.

        A step changes them on the current stream, on which a save copies them. What is put into
        them counts from the next step on. The weights that the model computes with do not
        follow until `follow_state`: an engine that continues is built with them.
        """

    def follow_state(self) -> None:
        """Let the model compute with the weights that were put into the state."""

    def counters(self) -> Counters:
        """The rest of the optimizer's state that a checkpoint must hold. Equal on every
        rank."""

    def set_counters(self, counters: Counters) -> None:
        """Restore `counters`."""

    def close(self) -> None:
        """Release the engine's resources. It cannot be used afterwards."""
