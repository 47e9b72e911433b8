"""What dropout does to adapters. Every layout is in test_pairs.py; continuing in another one,
and exports, in tests/checkpoint/test_reshape.py."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.cases import (
    LAYERS,
    TOLERANCE,
    Case,
    curves,
    each_case,
    megatron,
    new_engine,
    steps,
)
from tests.forked import call_ranks
from toolkit.engines.distributed import Ranks

RATE = 1e-2


def dropped(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Losses of a few steps, and what this rank then has of the factors that every rank of its
    tensor group holds whole."""
    engine, layout = new_engine(case, ranks)
    losses = curves(steps(engine, layout, ranks, 0, 3, RATE))["loss"]
    whole = {
        name: parameter.detach().clone()
        for name, parameter in engine.replicated_weights()
        if ".lora." in name and not getattr(parameter, "tensor_model_parallel", False)
    }
    engine.close()
    return {"loss": losses, "whole": whole}


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [True, False])
def test_dropout_leaves_factors_equal_on_tensor_ranks(sequence: bool) -> None:
    """Ranks with the same inputs drop the same of them, and recompute drops them again."""
    adapter = {"rank": 3, "alpha": 5, "targets": "all-linear"}
    without = replace(megatron(tensor=2, sequence=sequence, family=LAYERS), adapter=adapter)
    case = replace(without, adapter=adapter | {"dropout": 0.3})
    again = replace(case, recompute="full")
    ranks = call_ranks(each_case, 2, dropped, [without, case, again])
    one, other = (rank[case.name] for rank in ranks)
    assert len(one["whole"]) == 5 * 4
    for name, factor in one["whole"].items():
        assert factor.equal(other["whole"][name]), name
    assert ranks[0][again.name]["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
    assert one["loss"][1:] != pytest.approx(ranks[0][without.name]["loss"][1:], rel=TOLERANCE)
