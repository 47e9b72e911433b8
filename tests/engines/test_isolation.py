"""Documents of one row are apart: to the bit, and as if each were alone."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.engines.cases import LAYERS, MIXTRAL, TOLERANCE, megatron, zero
from tests.engines.isolation_worker import look, separate_documents
from tests.engines.parity_worker import Case, each_case
from tests.forked import run_ranks

WINDOWED = {"model_type": "mistral", "sliding_window": 3, "tie_word_embeddings": False}
"""Shorter than most documents."""
SOME_WINDOWED = {
    "model_type": "qwen2", "sliding_window": 3, "use_sliding_window": True,
    "max_window_layers": 1, "num_hidden_layers": 2,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_positions": 16}

SOME = [
    Case("ddp", 2),
    Case("deepspeed", 2, stage=3),
    megatron(tensor=2),
    zero(1),
]
OTHERS = [
    Case("fsdp", 2, stage=3, recompute="full"),
    *(Case("deepspeed", 2, stage=stage) for stage in (0, 1, 2)),
    Case("deepspeed", 2, stage=3, recompute="full"),
    megatron(tensor=2, sequence=False, recompute="full"),
    megatron(pipeline=2),
    megatron(pipeline=2, virtual_pipeline=2, family={"num_hidden_layers": 4}),
    megatron(tensor=2, family=WINDOWED),
    megatron(tensor=2, recompute="selective", family=SOME_WINDOWED),
    megatron(expert=2, family=MIXTRAL),
    Case("ddp", 2, family=WINDOWED),
    Case("ddp", 2, family=SOME_WINDOWED, recompute="full"),
]


@cache
def _reference(family: tuple[tuple[str, Any], ...]) -> dict[str, list[float]]:
    return separate_documents(dict(family))


def assert_isolated(cases: list[Case], world: int) -> None:
    cases = [replace(case, isolated=True) for case in cases]
    results = run_ranks(each_case, world, look, cases)[0]
    for case in cases:
        print(case.name)
        found = results[case.name]
        assert found["isolated"] == 0, "to the bit"
        assert found["own"] > 0
        assert found["crossing"] > 0, "the probe sees what it looks for"
        expected = _reference(tuple(case.family.items()))
        assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [pytest.param(SOME, marks=pytest.mark.quick), OTHERS], ids=["some", "others"]
)
def test_documents_of_a_row_are_apart(cases: list[Case]) -> None:
    assert_isolated(cases, world=2)
