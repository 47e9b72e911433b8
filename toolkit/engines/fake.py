"""A public fake: the smallest real engine, for tests of everything around engines.

It learns one logit per token, so its loss falls towards the unigram entropy of the
data. It has no transformer, takes microseconds a step, and keeps the whole contract of
`Engine`: several ranks, token-mean loss, saving, loading and export.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from toolkit.engines.base import IGNORE_INDEX, EvalResult, MicroBatch, StepResult, refusal
from toolkit.errors import CheckpointError

STATE = "fake.safetensors"


class FakeEngine:
    """A unigram model of `vocab_size` tokens, trained by plain gradient descent."""

    def __init__(self, vocab_size: int) -> None:
        self.logits = torch.zeros(vocab_size)
        self.learning_rates: list[float] = []
        """The rate of every step so far in this process."""

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        """See `Engine.train_step`."""
        self.learning_rates.append(learning_rate)
        logits = self.logits.clone().requires_grad_()
        loss, tokens = _mean_loss(logits, micro_batches)
        (gradient,) = torch.autograd.grad(loss, logits)
        loss, gradient = _sum_over_ranks(loss.detach()), _sum_over_ranks(gradient)
        norm = gradient.norm().item()
        skipped = refusal(loss.item(), max_loss, norm)
        if skipped is None:
            self.logits -= learning_rate * gradient
        return StepResult(loss.item(), norm, int(tokens.item()), skipped)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """See `Engine.evaluate`."""
        loss, tokens = _mean_loss(self.logits, micro_batches)
        return EvalResult(_sum_over_ranks(loss).item(), int(tokens.item()))

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.replicated_weights`."""
        yield "logits", self.logits

    def save_state(self, folder: Path) -> None:
        """See `Engine.save_state`."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_file({"logits": self.logits}, folder / STATE)

    def load_state(self, folder: Path) -> None:
        """See `Engine.load_state`."""
        if not (folder / STATE).is_file():
            raise CheckpointError(f"{folder} holds no state of the fake engine")
        self.logits = load_file(folder / STATE)["logits"]

    def export_hf(self, folder: Path) -> None:
        """Write the logits; there is no Hugging Face model to export."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_state(folder)

    def close(self) -> None:
        """See `Engine.close`."""


def _mean_loss(logits: Tensor, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
    """This rank's part of the token-mean loss, and all ranks' unmasked tokens."""
    labels = torch.cat([batch.labels.flatten() for batch in micro_batches])
    tokens = _sum_over_ranks((labels != IGNORE_INDEX).sum()).clamp(min=1)
    scores = logits.expand(len(labels), -1)
    total = cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / tokens, tokens


def _sum_over_ranks(value: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(value)
    return value
