"""A batch that would spoil the weights is left out by all ranks, and nothing else changes.

Regression for DeepSpeed#8415, DeepSpeed#8035 and Megatron-LM#3981. Every case is trained twice
from the same weights: once with faults, once with the batches of these steps left out. What
follows must be equal to the bit.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engines.cases import (
    Case,
    each_case,
    global_batches,
    megatron,
    new_engine,
    share,
    zero,
)
from tests.forked import call_ranks
from toolkit.batch import IGNORE_INDEX
from toolkit.engines.base import StepResult
from toolkit.engines.distributed import Ranks

STEPS = 6
NAN_LOSS, NAN_GRADIENT, NO_TOKENS, HIGH_LOSS = 1, 2, 3, 4
"""The spoiled steps: NaN in one rank's forward or backward, no label that counts, and a loss
above its limit."""
WHY = {
    NAN_LOSS: "the loss is not finite",
    NAN_GRADIENT: "the gradients are not finite",
    NO_TOKENS: "no token of the batch is trained",
    HIGH_LOSS: "the loss is above 0.5",
}
CASES = [
    Case("ddp", 2),
    Case("ddp", 2, precision="fp16"),
    Case("fsdp", 2, stage=3, offload="cpu", precision="fp16"),
    Case("deepspeed", 2, stage=0),
    Case("deepspeed", 2, stage=2, precision="bf16"),
    Case("deepspeed", 2, stage=3),
    Case("deepspeed", 2, stage=3, offload="cpu"),
    zero(2),
    megatron(pipeline=2),
    megatron(stage=1),
    replace(megatron(tensor=2), precision="fp16"),
]
"""One of each way to find it out: torch's, DeepSpeed's by stage and model, megatron-core's."""


def spoiled_steps(case: Case) -> set[int]:
    """In fp16 a NaN gradient rightly changes the loss scale, and with it what follows."""
    everywhere = {NAN_LOSS, NO_TOKENS, HIGH_LOSS}
    return everywhere | ({NAN_GRADIENT} if case.precision != "fp16" else set())


class Faults:
    """Faults of one rank, the last, at the steps of the plan."""

    def __init__(self, module: nn.Module) -> None:
        self.step: int | None = None
        """The step now done, when it is one to spoil."""
        norms = [part for name, part in module.named_modules() if name.endswith("norm")]
        norms[-1].register_forward_hook(self._spoil)

    def _spoil(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        if self.step == NAN_GRADIENT:
            output.register_hook(lambda gradient: gradient * math.inf)
        return output * math.nan if self.step == NAN_LOSS else output


def trained_module(engine: Any) -> nn.Module:
    """The model inside an engine."""
    if hasattr(engine, "chunks"):
        module: nn.Module = engine.chunks[-1]
        return module
    return engine.engine.module if hasattr(engine, "engine") else engine.model


def train(
    case: Case, ranks: Ranks, *, with_faults: bool
) -> tuple[list[StepResult | None], Any]:
    """The steps of a case, None where a batch was left out; the loss scaler at the end."""
    engine, layout = new_engine(case, ranks)
    faults = None
    if with_faults and ranks.rank == ranks.world - 1:
        faults = Faults(trained_module(engine))
    results: list[StepResult | None] = []
    for step, batch in enumerate(global_batches(STEPS)):
        spoil = step in spoiled_steps(case)
        if spoil and not with_faults:
            results.append(None)
            continue
        if faults is not None:
            faults.step = step if spoil else None
        if spoil and step == NO_TOKENS:
            batch = replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX))
        torch.manual_seed(step)
        max_loss = 0.5 if step == HIGH_LOSS and with_faults else math.inf
        rate = 1e-3 * (step + 1)
        results.append(engine.train_step(*share(batch, layout, ranks), rate, max_loss))
    scaler = engine.counters().loss_scale
    engine.close()
    return results, scaler


def compare(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Why steps were skipped on each rank, and the applied steps of both runs."""
    spoiled, spoiled_scaler = train(case, ranks, with_faults=True)
    dropped, dropped_scaler = train(case, ranks, with_faults=False)
    mine = {step: r.skipped for step, r in enumerate(spoiled) if r is not None and r.skipped}
    skipped: list[Any] = [None] * ranks.world
    dist.all_gather_object(skipped, mine)
    return {
        "skipped": skipped,
        "scalers": [spoiled_scaler, dropped_scaler],
        "spoiled": [[r.loss, r.grad_norm] for r in spoiled if r is not None and not r.skipped],
        "dropped": [[r.loss, r.grad_norm] for r in dropped if r is not None],
    }


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_two_processes() -> None:
    results = call_ranks(each_case, 2, compare, CASES)[0]
    for case in CASES:
        result, steps = results[case.name], spoiled_steps(case)
        why = {step: reason for step, reason in WHY.items() if step in steps}
        assert result["skipped"] == [why] * 2, case
        assert len(result["dropped"]) == STEPS - len(steps)
        assert result["spoiled"] == result["dropped"], case
        assert result["scalers"][0] == result["scalers"][1], case
