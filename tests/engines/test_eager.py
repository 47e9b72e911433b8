"""`kernels.attention: eager`: the numbers of plain transformers' eager attention, and no fused
kernel in any layer."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.engines.cases import LAYERS, assert_curves, megatron
from tests.engines.parity_worker import Case, each_case, plain_loop, reference_model, train
from tests.forked import call_ranks
from toolkit.engines.distributed import Ranks

STEPS = 3
FUSED = "scaled_dot_product_attention"


def train_eagerly(case: Case, ranks: Ranks) -> Any:
    """On a rank: train where nobody may call a fused attention."""
    places = [f"torch.nn.functional.{FUSED}"]
    if case.engine == "megatron":
        places.append(f"toolkit.models.megatron.attention.{FUSED}")
    for place in places:
        patch(place, side_effect=AssertionError("a fused kernel was asked for")).start()
    try:
        return train(case, ranks)
    finally:
        patch.stopall()


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize(
    "case", [Case("fsdp", 2, 2, family=LAYERS), megatron(tensor=2)], ids=["fsdp", "megatron"]
)
def test_layouts(case: Case) -> None:
    model, optimizer = reference_model(replace(case, engine="ddp", parallel={}))
    model.set_attn_implementation("eager")  # type: ignore[operator]
    expected = plain_loop(model, optimizer, STEPS)
    eager = replace(case, steps=STEPS, kernels={"attention": "eager"})
    (result,) = call_ranks(each_case, 2, train_eagerly, [eager])[0].values()
    assert_curves(result, expected)
