"""A public fake: the smallest real engine, for tests of the code around engines.

It learns one logit per token, so its loss falls towards the unigram entropy of the
data. It has no transformer, takes microseconds per step, and implements the whole contract of
`Engine`: several ranks, token-mean loss, saving and loading.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import StateShard, whole_block
from toolkit.engines import totals
from toolkit.engines.base import Counters, StepResult, refusal
from toolkit.models.log_probs import label_log_probs
from toolkit.objectives.base import Objective, Pretrain


class FakeEngine(totals.LogProbEngine):
    """A unigram model of `vocab_size` tokens, trained by plain gradient descent."""

    def __init__(self, vocab_size: int, objective: Objective | None = None) -> None:
        self.objective = objective or Pretrain()
        self.device = torch.device("cpu")
        self.logits = torch.zeros(vocab_size)
        self.unused = torch.zeros(2, vocab_size)
        self.steps = 0
        self.learning_rates: list[float] = []
        """The learning rate of every step so far in this process."""

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        count: float,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        self.learning_rates.append(learning_rate)
        gradient = torch.zeros_like(self.logits)
        sums = torch.zeros(1 + len(self.objective.metrics), dtype=torch.float64)
        for batch in micro_batches:
            logits = self.logits.clone().requires_grad_()
            loss, parts = totals.terms(self.objective, _log_probs(logits, batch), batch)
            gradient += torch.autograd.grad(loss / count, logits)[0]
            sums += parts / count
        mean_loss, *metrics = _sum_over_ranks(sums).tolist()
        norm = _sum_over_ranks(gradient).norm().item()
        skipped = refusal(count, mean_loss, max_loss, norm)
        if skipped is None:
            self.logits -= learning_rate * gradient
            self.steps += 1
        return StepResult(mean_loss, norm, skipped, totals.named(self.objective, metrics))

    def log_probs(self, batch: MicroBatch) -> Tensor:
        return _log_probs(self.logits, batch)

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "logits", self.logits

    def state(self) -> Iterator[StateShard]:
        """Its moments are zeros, plain gradient descent has none."""
        values = {
            "weight": self.logits,
            "exp_avg": self.unused[0],
            "exp_avg_sq": self.unused[1],
        }
        first = not dist.is_initialized() or dist.get_rank() == 0
        blocks = [whole_block("logits", self.logits.shape)]
        yield StateShard(blocks, values, saved_here=first)

    def counters(self) -> Counters:
        return Counters(self.steps)

    def set_counters(self, counters: Counters) -> None:
        self.steps = counters.optimizer_steps

    def close(self) -> None:
        """Nothing."""


def _log_probs(logits: Tensor, batch: MicroBatch) -> Tensor:
    """The same logits at every position."""
    return label_log_probs(logits.expand(*batch.labels.shape, -1), batch.labels)


def _sum_over_ranks(value: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(value)
    return value
