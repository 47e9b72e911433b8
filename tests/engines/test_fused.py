"""`kernels.fused: megatron`: the numbers of plain transformers, with SwiGLU as one kernel."""

from dataclasses import replace

import pytest

from tests.engines.cases import LAYERS, TOLERANCE, megatron, run, zero
from tests.engines.parity_worker import Case, reference

STEPS = 5
CASES = [
    megatron(tensor=2),
    megatron(pipeline=2, virtual_pipeline=2),
    megatron(4, stage=1, recompute="full"),
    zero(2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [pytest.param(CASES[:1], marks=pytest.mark.quick), CASES[1:]],
    ids=["some", "others"],
)
def test_every_layout(cases: list[Case]) -> None:
    expected = reference(family=LAYERS)
    fused = [replace(case, steps=STEPS, fused="megatron") for case in cases]
    for name, result in run(fused, 2).items():
        for quantity in ("loss", "grad_norm"):
            found = result[quantity]
            assert found == pytest.approx(expected[quantity][:STEPS], rel=TOLERANCE), name
