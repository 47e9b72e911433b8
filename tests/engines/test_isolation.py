"""Documents of one row are as if each were alone. Every engine that is built for such data
looks by itself whether one sees another."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from transformers import AutoConfig

from tests.engines.pairs import BASE, DENSE, Case, recipe_of, recorded
from tests.forked import call_ranks, run_ranks
from tests.models.small import tiny
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import Ranks, join, leave
from toolkit.engines.setup import EngineSetup
from toolkit.errors import PlanError
from toolkit.models import huggingface as hf
from toolkit.models.context import Context
from toolkit.models.families import attention, unsupported
from toolkit.models.weights import RandomWeights
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe
from toolkit.rehearse.comparison import TOLERANCE, Record, compare
from toolkit.rehearse.reference import plain_run
from toolkit.rehearse.worker import small_run
from toolkit.run.assignment import decide

WINDOWED = DENSE | {
    "model_type": "mistral", "sliding_window": 3, "tie_word_embeddings": False,
}  # fmt: skip
"""Shorter than most documents."""
SOME_WINDOWED = DENSE | {
    "model_type": "qwen2", "sliding_window": 3, "use_sliding_window": True,
    "max_window_layers": 1, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip


def packed(
    config: dict[str, Any], world: int = 2, attention: str = "auto", **parallel: Any
) -> Recipe:
    """A recipe with one to four documents in a row."""
    return Recipe.model_validate(
        BASE
        | {
            "model": {"config": config},
            "data": BASE["data"] | {"isolate_documents": True},
            "training": BASE["training"] | {"steps": 2},
            "kernels": {"attention": attention},
            "parallel": parallel,
            "cluster": {"gpus_per_node": world, "gpu": "cpu"},
        }
    )


CASES = [
    packed(WINDOWED, engine="megatron", context=2, recompute="full"),
    packed(SOME_WINDOWED, engine="megatron", tensor=2, recompute="selective"),
    # A recomputed layer needs the documents of its own batch: the next one has come before.
    packed(WINDOWED, attention="sdpa", engine="megatron", pipeline=2, recompute="full"),
    packed(SOME_WINDOWED, attention="sdpa", engine="fsdp", zero={"stage": 3}, recompute="full"),
]
"""Windows in split rows and layers; other models in every layout are in test_pairs.py."""


RULES = (
    "llama", "mistral", "qwen2_moe", "smollm3", "granite", "gpt2", "gpt_neox", "deepseek_v3",
    "gpt_oss", "gemma2", "gemma3_text", "llama4_text",
)  # fmt: skip
"""A family for each way to attend. Every engine looks for leaks in all of them."""


def _of_family(model_type: str) -> list[Recipe]:
    """The family on transformers, and on megatron-core where that can compute it."""
    config = tiny(model_type)
    if model_type in ("gemma2", "gpt_oss", "mistral"):
        config["sliding_window"] = 3
    if model_type == "qwen2_moe":  # transformers has it in its mask only
        config |= {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
    if model_type == "llama4_text":  # queries grow with their place in the row
        config["floor_scale"] = BASE["training"]["sequence_length"] + 1
    engines = ["ddp", *([] if unsupported(config) else ["megatron"])]
    if model_type == "gpt_oss":  # transformers' own is refused, see below
        # All experts: two of equal score would be chosen by the last digit.
        config["num_experts_per_tok"] = config["num_local_experts"]
        engines = ["megatron"]
    kernels = ["auto"]
    if attention(config) == "sdpa" and "attention_chunk_size" not in config:
        kernels.append("sdpa")
    return [
        packed(config, 1, kernel, engine=engine) for kernel in kernels for engine in engines
    ]


def train(ranks: Ranks, recipes: Sequence[Recipe]) -> list[Record]:
    """Each engine looks for leaks by itself before it trains."""
    return [recorded(small_run(decide(one, None), ranks)) for one in recipes]


def assert_equal_to_documents_alone(recipes: list[Recipe], world: int) -> None:
    """To transformers, each document in a forward pass of its own."""
    records = call_ranks(train, world, recipes)[0]
    for recipe, record in zip(recipes, records, strict=True):
        found = compare(record, _alone(json.dumps(recipe.model.config)), TOLERANCE)
        assert found.verdict in ("exact", "within"), (recipe.model.config, found.first)


@cache
def _alone(config: str) -> Record:
    losses, norms = zip(*plain_run(packed(json.loads(config), engine="ddp")), strict=True)
    return Record(losses, norms)


@pytest.mark.slow
def test_documents_of_a_row_are_apart() -> None:
    assert_equal_to_documents_alone(CASES, world=2)


@pytest.mark.slow
def test_every_rule_of_attention() -> None:
    recipes = [recipe for family in RULES for recipe in _of_family(family)]
    assert_equal_to_documents_alone(recipes, world=1)


def test_masks_without_positions_are_refused() -> None:
    """transformers' gpt_oss makes its masks of the past alone."""
    config = tiny("gpt_oss")
    with pytest.raises(AssertionError, match="type gpt_oss does not isolate the documents"):
        call_ranks(train, 1, [packed(config, 1, engine="ddp")])


RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
"""Models in which something runs along the row besides attention: a state, a convolution."""


def context_refusals(ranks: Ranks) -> dict[str, str]:
    """What context parallel is refused with, by type: also where positions are lost."""
    spread = recipe_of(Case("ddp-cp2"))
    assert spread is not None
    found = {one: refusal(one, ranks, spread) for one in ("qwen3", *RECURRENT, "bloom")}
    part = Context.part
    with patch.object(Context, "part", lambda *rows: replace(part(*rows), positions=None)):
        return found | {"llama": refusal("llama", ranks, spread)}


def refusal(model_type: str, ranks: Ranks, wanted: Recipe) -> str:
    """What building an engine of this type for the recipe is refused with."""
    small = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": DENSE["vocab_size"],
        "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **small, **RECURRENT.get(model_type, {}))
    config._experts_implementation = "eager"
    plan, weights = plan_recipe(wanted), RandomWeights(hf.meta_model(config), seed=1)
    setup = EngineSetup.of(wanted, plan, {}, ranks, config, weights)
    try:
        build_engine("ddp", setup).close()
    except PlanError as error:
        return str(error)
    return "accepted"


def _refusals() -> dict[str, str]:
    ranks, wanted = join(), packed(DENSE, 1, engine="ddp")
    found = {model_type: refusal(model_type, ranks, wanted) for model_type in RECURRENT}
    leave()
    return found


def test_models_whose_state_runs_along_the_row_are_refused() -> None:
    for model_type, why in run_ranks(_refusals, 1)[0].items():
        assert f"the model type {model_type} does not isolate the documents" in why
        assert "data.isolate_documents to false" in why


def test_models_that_lose_the_split_of_their_rows_are_refused() -> None:
    found = call_ranks(context_refusals, 2)[0]
    assert found.pop("qwen3") == "accepted"
    for model_type, why in found.items():
        assert f"{model_type} does not compute the same where context-parallel" in why
        assert "parallel.context to 1" in why
    assert "TypeError" in found["bloom"], "it adds the mask to its scores"
