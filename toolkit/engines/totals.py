"""Loss and metrics of an objective, summed over micro batches and ranks."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.batch import MicroBatch, row_log_probs
from toolkit.engines.base import Engine, EvalResult
from toolkit.engines.distributed import to_device
from toolkit.objectives.base import Objective


def terms(objective: Objective, log_probs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The summed loss of a micro batch with its autograd graph, a float64 scalar. Then,
    detached, loss and metrics: float64 [1 + metrics]."""
    found = objective.loss(log_probs, batch)
    parts = [found.loss, *(found.metrics[name] for name in objective.metrics)]
    return found.loss.double(), torch.stack([part.detach().double() for part in parts])


def named(objective: Objective, metrics: Sequence[float]) -> dict[str, float]:
    """The metrics by name."""
    return dict(zip(objective.metrics, metrics, strict=True))


def counted(objective: Objective, parts: Tensor, batch: MicroBatch) -> Tensor:
    """The input of `eval_result` for a micro batch with these `terms`: float64 [3 +
    metrics]."""
    counts = objective.count(batch), batch.trained.sum()
    return torch.cat([parts, torch.stack([count.double() for count in counts])])


def eval_result(objective: Objective, totals: Sequence[float]) -> EvalResult:
    """The result from the sum of what `counted` holds over all batches of all ranks."""
    *parts, count, tokens = totals
    loss, *metrics = (part / count if count else math.nan for part in parts)
    return EvalResult(loss, int(tokens), named(objective, metrics))


class LogProbEngine(Engine):
    """Evaluation by an engine that computes one micro batch after the other."""

    objective: Objective
    device: torch.device
    data_group: dist.ProcessGroup | None = None
    """The ranks over whose batches losses are summed. None: all."""
    repeats = 1
    """How many of these ranks have the same batches."""

    def log_probs(self, batch: MicroBatch) -> Tensor:
        """log p(label), 0 where the label is `IGNORE_INDEX`: fp32 [micro_batch, sequence]."""
        raise NotImplementedError

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of forward passes without a backward pass."""
        raise NotImplementedError

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        size = 3 + len(self.objective.metrics)
        totals = torch.zeros(size, dtype=torch.float64, device=self.device)
        with self.evaluating():
            for micro_batch in micro_batches:
                batch = to_device(micro_batch, self.device)
                _, parts = terms(self.objective, self.log_probs(batch), batch)
                totals += counted(self.objective, parts, batch)
        if dist.is_initialized():
            dist.all_reduce(totals, group=self.data_group)
        return eval_result(self.objective, (totals / self.repeats).tolist())

    def sequence_log_probs(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        with self.evaluating():
            batches = (to_device(batch, self.device) for batch in micro_batches)
            return torch.cat([row_log_probs(self.log_probs(b)) for b in batches]).cpu()
