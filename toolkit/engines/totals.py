"""Loss and metrics of an objective, summed over micro batches and ranks."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.batch import MicroBatch, row_log_probs
from toolkit.engines.base import EvalResult
from toolkit.engines.distributed import to_device
from toolkit.objectives.base import Objective


def terms(objective: Objective, log_probs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The summed loss of a micro batch with its autograd graph, a float64 scalar; and,
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


def sequence_log_probs(
    micro_batches: Sequence[MicroBatch],
    log_probs: Callable[[MicroBatch], Tensor],
    device: torch.device,
) -> Tensor:
    batches = (to_device(batch, device) for batch in micro_batches)
    return torch.cat([row_log_probs(log_probs(b)) for b in batches]).cpu()


def evaluate(
    objective: Objective,
    micro_batches: Sequence[MicroBatch],
    log_probs: Callable[[MicroBatch], Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    repeats: int = 1,
) -> EvalResult:
    """Loss over the batches of all of `group`'s ranks (None: of all ranks), so many of which
    have the same ones."""
    totals = torch.zeros(3 + len(objective.metrics), dtype=torch.float64, device=device)
    for micro_batch in micro_batches:
        batch = to_device(micro_batch, device)
        _, parts = terms(objective, log_probs(batch), batch)
        totals += counted(objective, parts, batch)
    if dist.is_initialized():
        dist.all_reduce(totals, group=group)
    return eval_result(objective, (totals / repeats).tolist())
