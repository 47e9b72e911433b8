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
CASES = [
    Case("ddp", 2),
    Case("ddp", 2, precision="fp16"),
    Case("fsdp", 2, stage=3, offload="cpu", precision="fp16"),
    Case("deepspeed", 2, stage=0, precision="bf16"),
    Case("deepspeed", 2, stage=1),
    Case("deepspeed", 2, stage=2, precision="bf16"),
    Case("deepspeed", 2, stage=3),
    zero(2),
    megatron(pipeline=2),
    megatron(stage=1),
    replace(megatron(tensor=2), precision="fp16"),
]
"""One of each way to find it out: torch's, DeepSpeed's by stage and model, megatron-core's."""


def check(cases: list[Case]) -> None:
    results = call_ranks(each_case, 2, compare, cases)[0]
    for case in cases:
        print(case.name)
        result = results[case.name]
        steps = spoiled_steps(case)
        assert result["skipped"] == [{s: why for s, why in WHY.items() if s in steps}] * 2
        assert len(result["dropped"]) == STEPS - len(steps)
        assert result["spoiled"] == result["dropped"]
        assert result["scalers"][0] == result["scalers"][1]


@pytest.mark.slow
def test_two_processes() -> None:
    check(CASES)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_cpu_offload() -> None:
    check([Case("deepspeed", 2, stage=3, offload="cpu")])
