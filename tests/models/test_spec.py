"""ModelSpec against published figures and what torch counts: parameters, FLOPs, windows."""

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.models.families import model_spec
from toolkit.models.frozen import spec_of as frozen_spec_of
from toolkit.models.model import check_config
from toolkit.models.spec import AdapterParameters, ModelSpec

Config = Mapping[str, Any]


def spec_of(config: Config) -> ModelSpec:
    assert check_config(config) == []
    return model_spec(config)


def shape(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


LLAMA_8B = shape(
    "llama", 4096, 14336, 32, 32, num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0
)
PUBLISHED = {
    # name: (config as published, parameters in the safetensors index or model card)
    "llama-3.1-8b": (LLAMA_8B, 8_030_261_248),
    "qwen2.5-7b": (
        shape("qwen2", 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064),
        7_615_616_512,
    ),
    "gpt2": ({"model_type": "gpt2"}, 124_439_808),
    "gpt-neox-20b": ({"model_type": "gpt_neox"}, 20_554_567_680),
    "gemma-2-2b": ({"model_type": "gemma2"}, 2_614_341_888),
    "gemma-3-1b": (
        shape("gemma3_text", 1152, 6912, 26, 4, num_key_value_heads=1, head_dim=256)
        | {"vocab_size": 262144},
        999_885_952,
    ),
    "olmo-3-7b": (shape("olmo3", 4096, 11008, 32, 32, vocab_size=100278), 7_298_011_136),
    "mixtral-8x7b": ({"model_type": "mixtral"}, 46_702_792_704),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
        20_914_757_184,
    ),
    # "671B", model card; without the 61st layer's multi-token prediction
    "deepseek-v3": ({"model_type": "deepseek_v3"}, 671_026_404_352),
    # Its index has 110,468,824,832 elements: also 46 · 128 of biases, and 3,616,573,440 of a
    # layer for multi-token prediction, which transformers leaves out.
    "glm-4.5-air": (
        {"model_type": "glm4_moe", "head_dim": 128, "attention_bias": True},
        106_852_245_504,
    ),
    "qwen3-30b-a3b": (
        shape("qwen3_moe", 2048, 6144, 48, 32, num_key_value_heads=4, head_dim=128),
        30_532_122_624,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_published_number_of_parameters(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert spec_of(config).parameters.total == parameters


def test_active_parameters_leave_out_the_experts_not_chosen() -> None:
    mixtral = spec_of(PUBLISHED["mixtral-8x7b"][0]).parameters
    assert mixtral.active == 12_879_925_248  # "12.9B active", Mixtral paper (2401.04088)
    qwen = spec_of(PUBLISHED["qwen3-30b-a3b"][0]).parameters  # "3.3B activated", model card
    assert qwen.active == qwen.total - 48 * (128 - 8) * 3 * 2048 * 768 == 3_353_032_704
    dense = spec_of(LLAMA_8B).parameters
    assert dense.active == dense.total


def small(model_type: str, **more: Any) -> dict[str, Any]:
    return shape(model_type, 48, 56, 3, 4, vocab_size=96, **more)


MIXTRAL = small("mixtral", num_key_value_heads=2)


def measured_flops(config: Config, sequence: int, freeze: Sequence[str]) -> int:
    """FLOPs that torch counts forward and backward in the eager model, rotary tables left
    out."""
    built = AutoConfig.for_model(**config)
    built._attn_implementation = "eager"
    built._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(built)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in freeze))
    if freeze == ["*"]:  # adapters in every layer
        model.enable_input_require_grads()
    batch = 2
    ids = torch.randint(0, 90, (batch, sequence))
    counter = FlopCounterMode(display=False)
    with counter:
        model(ids, use_cache=False).logits.sum().backward()
    by_module = counter.get_flop_counts()
    rotary = sum(
        sum(counts.values()) for name, counts in by_module.items() if "rotary_emb" in name
    )
    total = counter.get_total_flops() - rotary
    assert total % batch == 0
    return total // batch


@pytest.mark.parametrize(
    "freeze",
    [
        [],
        ["*"],
        ["*embed_tokens*"],
        ["*embed_tokens*", "lm_head*"],
        ["*.self_attn.*"],
        ["*embed_tokens*", "*.layers.0.*"],
        ["*.layers.0.*"],
        ["*embed_tokens*", "*.layers.*", "*.norm.*"],
    ],
    ids=str,
)
def test_flops_with_frozen_weights_are_what_torch_counts(freeze: list[str]) -> None:
    sequence = 16
    if freeze == ["*"]:
        spec = dataclasses.replace(spec_of(MIXTRAL), adapters=AdapterParameters(1, 1))
    else:
        spec = frozen_spec_of(MIXTRAL, freeze)
    ours = spec.flops_per_token(sequence, causal=False) * sequence
    measured = measured_flops(MIXTRAL, sequence, freeze)
    assert ours == pytest.approx(measured, rel=0.01)  # biases count as weights


def test_causal_flops_count_the_pairs_that_the_mask_leaves() -> None:
    for window in (None, 1, 5, 16, 40):
        config = small("mistral", num_key_value_heads=2, sliding_window=window)
        spec, sequence = spec_of(config), 16
        pairs = sum(min(position + 1, window or sequence) for position in range(sequence))
        weights_only = spec.flops * sequence
        causal = spec.forward_flops_per_token(sequence, causal=True) * sequence
        per_pair = 4 * spec.heads * spec.head_dim * spec.layers
        assert causal == pytest.approx(weights_only + per_pair * pairs, rel=1e-12)


@pytest.mark.parametrize("sequence", [3, 4, 11])
def test_causal_flops_of_chunks_count_the_pairs_inside_them(sequence: int) -> None:
    kinds = {"attention_chunk_size": 4, "no_rope_layers": [1, 0, 1], "num_local_experts": 4}
    spec = spec_of(small("llama4_text", num_key_value_heads=2, head_dim=14, **kinds))
    place = torch.arange(sequence)
    past = place[:, None] >= place
    chunked = past & (place[:, None] // 4 == place // 4)
    pairs = int(spec.sliding_layers * chunked.sum() + past.sum())
    per_pair, weights = 4 * spec.heads * spec.head_dim, spec.flops * sequence
    assert (spec.layers, spec.sliding_layers) == (3, 2)
    causal = spec.forward_flops_per_token(sequence, causal=True) * sequence
    assert causal == pytest.approx(weights + per_pair * pairs, rel=1e-12)


def test_llama_3_8b_flops_agree_with_6n_plus_attention() -> None:
    # PaLM appendix B: 6·N + 12·L·H·Q·T with N leaving out the embedding lookup.
    spec = spec_of(LLAMA_8B)
    matrices = spec.parameters.total - spec.parameters.embedding - spec.parameters.norms
    expected = 6 * matrices + 12 * 32 * 32 * 128 * 8192
    assert spec.flops_per_token(8192, causal=False) == expected
    assert spec.flops_per_token(8192, causal=True) < expected


WINDOWS = {
    "mistral": ({"model_type": "mistral"}, 4096, 32),
    "mistral without": ({"model_type": "mistral", "sliding_window": None}, None, 0),
    "qwen2 off": ({"model_type": "qwen2"}, None, 0),
    "qwen2 on": ({"model_type": "qwen2", "use_sliding_window": True}, 4096, 4),
    "qwen3_moe on": ({"model_type": "qwen3_moe", "use_sliding_window": True}, 4096, 24),
    "gemma3_text": ({"model_type": "gemma3_text"}, 4096, 22),
    "llama4_text": ({"model_type": "llama4_text"}, 8192, 36),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_layers_are_those_of_transformers(name: str) -> None:
    config, window, layers = WINDOWS[name]
    spec = spec_of(config)
    assert (spec.sliding_window, spec.sliding_layers) == (window, layers)
