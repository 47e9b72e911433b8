"""`kernels.experts: grouped`: the numbers of plain transformers, all experts in one product."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.engines.cases import MIXTRAL, assert_curves, megatron, run
from tests.engines.parity_worker import Case, reference
from tests.models.configs import config_of

STEPS = 5
MANY = MIXTRAL | {"num_local_experts": 16}
"""Some of them without a token in most of the micro batches, which are of 16 tokens."""
QWEN3 = config_of("qwen3_moe", num_hidden_layers=2, tie_word_embeddings=False)
CASES = [
    megatron(1, expert=2, family=MANY),
    megatron(1, stage=0, recompute="full", family=QWEN3),
]


@cache
def _reference(mixtral: int | None) -> dict[str, list[float]]:
    return reference(family=MIXTRAL | {"num_local_experts": mixtral} if mixtral else QWEN3)


def check(cases: list[Case]) -> None:
    kernels = {"experts": "grouped"}
    grouped = [replace(case, steps=STEPS, kernels=kernels) for case in cases]
    results = run(grouped, 2)
    for case in grouped:
        expected = _reference(case.family.get("num_local_experts"))
        assert_curves(results[case.name], expected, STEPS, name=case.name)


@pytest.mark.slow
@pytest.mark.quick
def test_experts_without_tokens() -> None:
    check(CASES)


@pytest.mark.slow
def test_weights_on_their_way(tmp_path: Path) -> None:
    """In small buckets, an expert's weights are still gathered when the layer before it
    computes; nobody calls the expert. A save and a new engine come between two steps."""
    cases = [
        megatron(1, stage=1, family=MANY),
        megatron(1, expert=2, family=MANY),
        replace(megatron(1, stage=1, family=MIXTRAL), resume_in=str(tmp_path)),
    ]
    check([replace(case, bucket=3000) for case in cases])
