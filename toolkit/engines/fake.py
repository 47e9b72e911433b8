"""A public fake: the smallest real engine, for tests of everything around engines.

It learns one logit per token, so its loss falls towards the unigram entropy of the
data. It has no transformer, takes microseconds a step, and keeps the whole contract of
`Engine`: several ranks, token-mean loss, saving and loading.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.checkpoint.shards import StateShard, whole_block
from toolkit.engines.base import Counters, EvalResult, StepResult, refusal


class FakeEngine:
    """A unigram model of `vocab_size` tokens, trained by plain gradient descent."""

    def __init__(self, vocab_size: int) -> None:
        self.logits = torch.zeros(vocab_size)
        self.unused = torch.zeros(2, vocab_size)
        self.steps = 0
        self.learning_rates: list[float] = []
        """The rate of every step so far in this process."""

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        tokens: int,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        """See `Engine.train_step`."""
        self.learning_rates.append(learning_rate)
        logits = self.logits.clone().requires_grad_()
        loss = _summed_loss(logits, micro_batches) / tokens
        (gradient,) = torch.autograd.grad(loss, logits)
        loss, gradient = _sum_over_ranks(loss.detach()), _sum_over_ranks(gradient)
        norm = gradient.norm().item()
        skipped = refusal(tokens, loss.item(), max_loss, norm)
        if skipped is None:
            self.logits -= learning_rate * gradient
            self.steps += 1
        return StepResult(loss.item(), norm, tokens, skipped)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """See `Engine.evaluate`."""
        tokens = int(_sum_over_ranks(torch.tensor(sum(b.tokens for b in micro_batches))))
        loss = _summed_loss(self.logits, micro_batches) / tokens
        return EvalResult(_sum_over_ranks(loss).item(), tokens)

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.replicated_weights`."""
        yield "logits", self.logits

    def state(self) -> Iterator[StateShard]:
        """See `Engine.state`; its moments are zeros, plain gradient descent has none."""
        values = {
            "weight": self.logits,
            "exp_avg": self.unused[0],
            "exp_avg_sq": self.unused[1],
        }
        first = not dist.is_initialized() or dist.get_rank() == 0
        blocks = [whole_block("logits", self.logits.shape)]
        yield StateShard(blocks, values, saved_here=first)

    def counters(self) -> Counters:
        """See `Engine.counters`."""
        return Counters(self.steps)

    def set_counters(self, counters: Counters) -> None:
        """See `Engine.set_counters`."""
        self.steps = counters.optimizer_steps

    def close(self) -> None:
        """See `Engine.close`."""


def _summed_loss(logits: Tensor, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Sum of this rank's cross entropies."""
    labels = torch.cat([batch.labels.flatten() for batch in micro_batches])
    scores = logits.expand(len(labels), -1)
    return cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def _sum_over_ranks(value: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(value)
    return value
