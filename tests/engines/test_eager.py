"""`kernels.attention: eager`: the numbers of plain transformers' eager attention, and no fused
kernel in any layer."""

from dataclasses import replace

import pytest

from tests.engines.cases import LAYERS, assert_curves, megatron
from tests.engines.eager_worker import train_eagerly
from tests.engines.parity_worker import Case, each_case, plain_loop, reference_model
from tests.forked import call_ranks

STEPS = 5


def eager(case: Case) -> Case:
    return replace(case, steps=STEPS, kernels={"attention": "eager"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("fsdp", 2, 2, family=LAYERS), marks=pytest.mark.quick),
        pytest.param(megatron(tensor=2), marks=pytest.mark.quick),
    ],
    ids=["fsdp", "megatron"],
)
def test_layouts(case: Case) -> None:
    model, optimizer = reference_model(replace(case, engine="ddp", parallel={}))
    model.set_attn_implementation("eager")  # type: ignore[operator]
    expected = plain_loop(model, optimizer, STEPS)
    (result,) = call_ranks(each_case, 2, train_eagerly, [eager(case)])[0].values()
    assert_curves(result, expected)
