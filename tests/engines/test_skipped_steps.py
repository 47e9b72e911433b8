"""A batch that would spoil the weights is left out by all ranks, and nothing else changes.

Regression for DeepSpeed#8415, DeepSpeed#8035 and Megatron-LM#3981.
"""

from dataclasses import replace

import pytest

from tests.engines.cases import megatron, zero
from tests.engines.parity_worker import Case, each_case
from tests.engines.skip_worker import (
    HIGH_LOSS,
    NAN_GRADIENT,
    NAN_LOSS,
    NO_TOKENS,
    STEPS,
    compare,
    spoiled_steps,
)
from tests.forked import call_ranks

WHY = {
    NAN_LOSS: "the loss is not finite",
    NAN_GRADIENT: "the gradients are not finite",
    NO_TOKENS: "no token of the batch is trained",
    HIGH_LOSS: "the loss is above 0.5",
}
TWO = [
    Case("ddp", 2),
    *(Case("deepspeed", 2, stage=stage) for stage in range(4)),
    *(Case("deepspeed", 2, stage=stage, precision="bf16") for stage in (0, 1, 2, 3)),
    megatron(tensor=2),
    megatron(pipeline=2),
    megatron(stage=1),
    Case("fsdp", 2, stage=3),
    Case("ddp", 2, precision="fp16"),
    Case("fsdp", 2, stage=3, offload="cpu", precision="fp16"),
    replace(megatron(tensor=2), precision="fp16"),
]


def check(cases: list[Case], world: int) -> None:
    results = call_ranks(each_case, world, compare, cases)[0]
    for case in cases:
        print(case.name)
        result = results[case.name]
        steps = spoiled_steps(case)
        assert result["skipped"] == [{s: why for s, why in WHY.items() if s in steps}] * world
        assert len(result["dropped"]) == STEPS - len(steps)
        assert result["spoiled"] == result["dropped"]
        assert result["scalers"][0] == result["scalers"][1]


@pytest.mark.slow
def test_two_processes() -> None:
    check(TWO, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_cpu_offload() -> None:
    check([Case("deepspeed", 2, stage=stage, offload="cpu") for stage in (2, 3)], 2)


@pytest.mark.slow
def test_deepspeed_with_a_megatron_model() -> None:
    check([zero(0), zero(2)], 4)
