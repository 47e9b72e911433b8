"""A shrunk model is small, valid, and divides as the large one does."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import ROOT
from toolkit.intake.load import load_recipe
from toolkit.layout import Layout
from toolkit.models.families import FAMILIES, model_spec
from toolkit.models.model import check_config
from toolkit.models.spec import ModelSpec
from toolkit.rehearse.rehearsal import Options, prepare
from toolkit.rehearse.shrink import (
    SMALL_PARAMETERS,
    alike,
    shrink_config,
    shrink_window,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [0, 47],
}
ANY_LAYOUT = Layout()
RECIPES = sorted({path.parent: path for path in ROOT.glob("recipes/*/*.yaml")}.values())
"""One of each folder."""


def shrunk(config: dict[str, Any], layout: Layout = ANY_LAYOUT) -> dict[str, Any]:
    """The small config, known to be valid."""
    small = shrink_config(config, layout)
    assert check_config(small) == []
    return small


def spec(config: dict[str, Any], layout: Layout = ANY_LAYOUT) -> ModelSpec:
    return model_spec(shrunk(config, layout))


@given(st.integers(8, 10**6), st.sampled_from([(8, 2), (3, 3), (6, 2), (16, 2)]))
def test_alike_keeps_what_the_full_degree_divides(
    original: int, degrees: tuple[int, int]
) -> None:
    full, rehearsed = degrees
    small = alike(original, 2, full, rehearsed)
    assert 1 <= small <= original
    assert (small % rehearsed == 0) == (original % full == 0)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_shrinks(path: Path) -> None:
    rehearsal = prepare(load_recipe(path), Options())
    before, after = rehearsal.original.model.config, rehearsal.recipe.model.config
    assert before is not None
    assert after is not None
    assert check_config(after) == []
    large, small = model_spec(before), model_spec(after)
    assert small.parameters.total <= 3 * SMALL_PARAMETERS
    assert large.heads // large.kv_heads == small.heads // small.kv_heads
    for degree in (2, 4):
        assert large.layers % degree == small.layers % degree or large.layers in (46, 126)
    for name in ("tied_embeddings", "qkv_bias", "mlp_bias", "query_key_norm", "layer_norm",
                 "gated_mlp", "learned_positions", "norms_per_layer", "family"):  # fmt: skip
        assert getattr(large, name) == getattr(small, name), name
    for name in ("rope_theta", "rope_scaling", "rope_parameters", "rotary_pct"):
        assert before.get(name) == after.get(name), name
    training = rehearsal.recipe.training
    assert training.precision == "fp32"
    assert training.sequence_length <= 33


def test_layers_that_do_not_divide_stay_so() -> None:
    """126 layers on 16 stages: uneven, although 2 stages would divide 126 and 6."""
    stages = Layout(pp=16)
    assert spec(LLAMA | {"num_hidden_layers": 126}, stages).layers % 2 == 1
    assert spec(LLAMA | {"num_hidden_layers": 80}, stages).layers == 4
    assert spec(LLAMA | {"num_hidden_layers": 30}).layers == 6


def test_vocabulary_that_does_not_divide_stays_so() -> None:
    assert spec(LLAMA | {"vocab_size": 50257}).vocab % 2 == 1
    assert spec(LLAMA | {"vocab_size": 50260}).vocab % 2 == 0
    tensor = Layout(tp=8)
    assert spec(LLAMA | {"vocab_size": 50260}, tensor).vocab % 2 == 1


def test_more_ranks_than_groups_stay_so() -> None:
    found = spec(LLAMA, Layout(tp=16))
    assert (found.heads, found.kv_heads) == (4, 1)


@pytest.mark.parametrize(("share", "size"), [(0.25, 8), (0.75, 8), (0.125, 16), (1.0, 8)])
def test_partial_rotation_keeps_whole_pairs(share: float, size: int) -> None:
    neox = {"model_type": "gpt_neox", "rotary_pct": share, "num_attention_heads": 48}
    found = shrunk(neox)
    assert found["hidden_size"] // found["num_attention_heads"] == size


def test_longrope_keeps_a_factor_for_every_pair() -> None:
    long = [1.0 + pair for pair in range(36)]
    phi = {
        "model_type": "phi3", "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 36, "long_factor": long},
    }  # fmt: skip
    found = shrunk(phi)
    assert found["hidden_size"] // found["num_attention_heads"] == 8
    assert found["rope_scaling"]["short_factor"] == [1.0] * 3
    assert found["rope_scaling"]["long_factor"] == [1.0, 13.0, 25.0]


def test_layers_without_rotary_stay_so() -> None:
    turned = [1, 0, *[1] * 33, 0]
    found = shrunk({"model_type": "smollm3", "no_rope_layers": turned})
    assert (found["num_hidden_layers"], found["no_rope_layers"]) == (4, [1, 0, 1, 0])
    assert found["pad_token_id"] == found["vocab_size"] - 1, "its default is no token any more"


def test_experts() -> None:
    found = shrunk(QWEN3_MOE)
    assert (found["num_experts"], found["num_experts_per_tok"]) == (4, 2)
    assert found["mlp_only_layers"] == [0, 3]
    assert model_spec(found).moe_layers == 2


def test_layer_types_of_the_first_and_last_layers() -> None:
    types = ["sliding_attention", "full_attention"] * 13
    found = shrunk({"model_type": "gemma2", "num_hidden_layers": 26, "layer_types": types})
    assert found["num_hidden_layers"] == 6
    assert set(found["layer_types"]) == {"sliding_attention", "full_attention"}
    window = {"use_sliding_window": True, "max_window_layers": 20}
    qwen = {"model_type": "qwen2", "num_hidden_layers": 40, "head_dim": 128}
    assert shrunk(qwen | window)["max_window_layers"] == 2


def test_sliding_window_hides_the_same_share() -> None:
    config = {"model_type": "mistral", "sliding_window": 4096}
    assert shrink_window(config, 8192, 32)["sliding_window"] == 16
    assert shrink_window(config, 4096, 32)["sliding_window"] == 4096
    off = {"model_type": "mistral", "sliding_window": None}
    assert shrink_window(off, 8192, 32) == off


def test_special_tokens_move_into_the_vocabulary() -> None:
    tokens = {"bos_token_id": 128000, "eos_token_id": [128001, 5], "pad_token_id": None}
    found = shrunk(LLAMA | tokens)
    assert (found["bos_token_id"], found["eos_token_id"]) == (127, [127, 5])
    assert found["pad_token_id"] is None


def test_every_family_has_a_small_form() -> None:
    for family in FAMILIES:
        config: dict[str, Any] = {"model_type": family}
        if family in ("qwen2", "qwen3_moe", "glm4_moe"):
            config["head_dim"] = 128
        # glm4 has 16 query heads for a key head, and keeps them.
        assert spec(config).parameters.total <= 2 * SMALL_PARAMETERS, family
