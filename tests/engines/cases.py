"""Cases of the engines' tests, and how near to the reference they must be."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.engines.parity_worker import Case, each_case, train
from tests.forked import call_ranks

TOLERANCE = 1e-5

OFFLOAD_TOLERANCE = 1e-4
"""DeepSpeed's C++ Adam rounds differently from torch's."""


def run(cases: list[Case], world: int) -> dict[str, Any]:
    """Train `cases` one after the other in one group of `world` real processes."""
    return call_ranks(each_case, world, train, cases)[0]


def assert_curves(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    steps: int | None = None,
    tolerance: float = TOLERANCE,
    name: str = "",
) -> None:
    """Loss and gradient norm of each step are those of the reference, of its first `steps`."""
    for quantity in ("loss", "grad_norm"):
        wanted = expected[quantity][:steps]
        assert found[quantity] == pytest.approx(wanted, rel=tolerance), f"{quantity} {name}"


LAYERS = {"num_hidden_layers": 5}

MIXTRAL = {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip

GLM = {
    "model_type": "glm4_moe", "num_hidden_layers": 3, "n_routed_experts": 8, "head_dim": 16,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
"""Sigmoid scores, correction biases, and one dense layer."""
BIAS = {"kind": "bias", "coefficient": 0.05, "bias_update": 0.02, "z_loss": 0.0}
"""The balancing of GLM."""


def megatron(micro_batch: int = 2, family: dict[str, Any] = LAYERS, **parallel: Any) -> Case:
    """A case of the engine megatron."""
    stage = parallel.pop("stage", "auto")
    recompute = parallel.pop("recompute", "none")
    return Case(
        "megatron", micro_batch, stage, recompute=recompute, family=family,
        parallel=parallel,
    )  # fmt: skip


def zero(stage: int, offload: str = "none", recompute: str = "none", **family: Any) -> Case:
    """A case of the engine deepspeed with a Megatron model in tensor 2."""
    return Case(
        "deepspeed", 2, stage, offload, recompute=recompute,
        family=family or LAYERS, parallel={"model": "megatron", "tensor": 2},
    )  # fmt: skip
