"""Megatron layouts against the same plain transformers loop as every other layout.

The vocabulary (101) divides by no tensor-parallel degree, the embedding is tied, the five
layers divide by no pipeline, and tensor 4 exceeds the two key/value heads. (Regression for
Megatron-LM#1736, a vocabulary that tensor parallel does not divide.)
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases import (
    LAYERS,
    MIXTRAL,
    Case,
    assert_curves,
    megatron,
    recipe,
    reference,
    run,
)
from tests.models.configs import config_of
from toolkit.backend import BACKENDS
from toolkit.plan.planner import plan_recipe

PADDED = LAYERS | {"pad_token_id": 7}
"""transformers gives the input embedding of token 7 no gradient."""
OLMO2 = {"model_type": "olmo2", "tie_word_embeddings": False, "pad_token_id": 7}
"""A norm over the whole width of queries and keys, which tensor parallel splits."""
GEMMA2 = {"model_type": "gemma2", "head_dim": 32, "sliding_window": 5}
GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 32,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
}
QWEN3 = {"model_type": "qwen3", "head_dim": 32}
GRANITE = {
    "model_type": "granite", "embedding_multiplier": 6.0, "attention_multiplier": 0.5,
    "residual_multiplier": 0.4, "logits_scaling": 2.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8,
    },
}  # fmt: skip
"""Factors that functions of ours apply, and rotary positions with one of their own."""

LONG = {
    "model_type": "phi3", "pad_token_id": None, "max_position_embeddings": 32,
    "rope_scaling": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 14,
        "long_factor": [4.0] * 8, "short_factor": [1.5] * 8,
    },
}  # fmt: skip
"""Frequencies that depend on positions which only one of two context ranks has."""
LATENT = config_of(
    "deepseek_v3",
    num_hidden_layers=2,
    rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
        "mscale": 1.0, "mscale_all_dim": 0.7,
    },
)  # fmt: skip
GPT_OSS = config_of("gpt_oss", num_hidden_layers=2)
BIASED = [
    megatron(pipeline=2, family=config_of("glm4_moe without groups")),
    *(
        megatron(tensor=2, family=family)
        for family in (
            GPT_OSS,
            *map(config_of, ("llama tied with biases", "gpt2", "qwen2_moe")),
        )
    ),
]
"""Biases of projections, of MLPs, of experts, and a router's."""
EIGHT = {"num_hidden_layers": 8}
GROUPED = {"experts": "grouped"}
"""All experts in one product."""
MANY = MIXTRAL | {"num_local_experts": 16}
"""Some of them without a token in most of the micro batches, which are of 16 tokens."""
QWEN3_MOE = config_of("qwen3_moe", num_hidden_layers=2, tie_word_embeddings=False)
TWO = [
    megatron(tensor=2, sequence=False, family=PADDED),
    megatron(tensor=2, family=QWEN3),
    megatron(tensor=2, family=GRANITE),
    megatron(tensor=2, sequence=False, family=OLMO2),
    megatron(pipeline=2, recompute="selective", family=GEMMA2),
    megatron(tensor=2, recompute="full", family=GEMMA3),
    megatron(tensor=2, family=config_of("deepseek_v3", num_hidden_layers=2)),
    *(
        megatron(context=2, recompute=recompute, family=family)
        for recompute, family in (
            ("none", GEMMA2),
            ("full", GEMMA3),
            ("none", LONG),
            ("full", LATENT),
        )
    ),
    megatron(context=2, expert=2, family=GPT_OSS),
    replace(megatron(1, expert=2, family=MANY), kernels=GROUPED),
    replace(megatron(1, stage=0, recompute="full", family=QWEN3_MOE), kernels=GROUPED),
    *BIASED,
]
"""Families that can be cut wrongly; all layouts of others are in test_pairs.py."""


def rendered_config(case: Case) -> dict[str, Any]:
    """`megatron.json` of a case on four ranks."""
    wanted = recipe(case, 4)
    return BACKENDS["megatron"].render(wanted, plan_recipe(wanted).layout)


def check(cases: list[Case]) -> None:
    results = run(cases, world=2)
    for case in cases:
        assert_curves(results[case.name], reference(case), name=str(case))


@pytest.mark.slow
def test_two_processes() -> None:
    check(TWO)


@pytest.mark.slow
@pytest.mark.quick
def test_many_buckets_on_their_way(tmp_path: Path) -> None:
    """The model is one bucket otherwise; they are reduced, and weights gathered, while others
    are computed with. A save and a new engine come between two steps."""
    cases = [
        megatron(1, stage=1),
        megatron(1, stage=0),
        megatron(1, expert=2, family=MIXTRAL),
        # Nobody calls an expert by itself.
        replace(megatron(1, stage=1, family=MANY), kernels=GROUPED, resume_in=str(tmp_path)),
        replace(megatron(1, expert=2, family=MANY), kernels=GROUPED),
        replace(megatron(2, stage=1, recompute="full"), resume_in=str(tmp_path)),
    ]
    check([replace(case, bucket=3000) for case in cases])
    rendered = rendered_config(cases[0])["ddp"]
    assert rendered["overlap_grad_reduce"] and rendered["overlap_param_gather"]


@pytest.mark.slow
def test_pipeline_messages_on_their_way() -> None:
    case = megatron(1, pipeline=2, virtual_pipeline=2, stage=1, family=EIGHT)
    check([case])
    messages = rendered_config(case)["transformer"]
    assert messages["overlap_p2p_comm"] and not messages["deallocate_pipeline_outputs"]


@pytest.mark.slow
def test_fp16_keeps_fp32_masters() -> None:
    """16 bits round, but alike in every layout; the loss scale skips no step."""
    layouts = megatron(tensor=2), megatron(pipeline=2), megatron(stage=1)
    cases = [replace(case, precision="fp16", steps=3) for case in layouts]
    results = run(cases, world=2)
    for case in cases:
        expected, result = reference(case), results[case.name]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-3), case
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-2), case
