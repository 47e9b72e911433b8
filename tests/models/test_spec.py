"""ModelSpec against the real transformers models: counts, FLOPs, windows."""

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from toolkit.models.config_check import check_config
from toolkit.models.families import FAMILIES, model_spec, settings_of
from toolkit.models.families.shape import counted as counted_on_tensors
from toolkit.models.families.shape import sizes
from toolkit.models.frozen import spec_of as frozen_spec_of
from toolkit.models.spec import AdapterParameters, ModelSpec

Config = Mapping[str, Any]


def transformers_config(config: Config) -> PreTrainedConfig:
    rest = {key: value for key, value in config.items() if key != "model_type"}
    return AutoConfig.for_model(config["model_type"], **rest)


def meta_model(config: Config) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(transformers_config(config))


PARTS = (
    # First match wins: a norm inside attention is a norm, a router inside an mlp a router.
    ("norm", "norms"),
    (".ln_", "norms"),
    ("lm_head", "lm_head"),
    ("wpe", "position_embedding"),
    ("embed", "embedding"),
    ("wte", "embedding"),
    (".experts.", "experts"),
    ("mlp.gate.", "router"),
    (".router.", "router"),
    ("attn", "attention"),
    ("attention", "attention"),
    ("mlp", "mlp"),
    ("feed_forward", "mlp"),
)


def counted(config: Config) -> dict[str, int]:
    """Parameters of the real model by part."""
    parts = dict.fromkeys((part for _, part in PARTS), 0)
    for name, parameter in meta_model(config).named_parameters():
        parts[next(part for word, part in PARTS if word in name)] += parameter.numel()
    return parts


def spec_of(config: Config) -> ModelSpec:
    assert check_config(config) == []
    return model_spec(config)


def assert_counts_match(config: Config) -> ModelSpec:
    spec = spec_of(config)
    counts = dataclasses.asdict(spec.parameters)
    counts.pop("inactive_experts")
    expected = counted(config)
    assert counts == expected
    assert spec.parameters.total == sum(expected.values())
    return spec


def shape(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, **more: Any
) -> dict:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


LLAMA3 = {"num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0}
TIED = {"tie_word_embeddings": True}
QWEN3 = {"num_key_value_heads": 8, "head_dim": 128}
PUBLISHED = {
    # name: (config as published, parameters in the safetensors index or model card)
    "llama-2-7b": (shape("llama", 4096, 11008, 32, 32), 6_738_415_616),
    "llama-2-70b": (shape("llama", 8192, 28672, 80, 64, num_key_value_heads=8), 68_976_648_192),
    "llama-3.1-8b": (shape("llama", 4096, 14336, 32, 32, **LLAMA3), 8_030_261_248),
    "llama-3.1-70b": (shape("llama", 8192, 28672, 80, 64, **LLAMA3), 70_553_706_496),
    "llama-3.1-405b": (shape("llama", 16384, 53248, 126, 128, **LLAMA3), 405_853_388_800),
    "llama-3.2-1b": (
        shape("llama", 2048, 8192, 16, 32, head_dim=64, **LLAMA3, **TIED),
        1_235_814_400,
    ),
    "llama-3.2-3b": (
        shape("llama", 3072, 8192, 28, 24, head_dim=128, **LLAMA3, **TIED),
        3_212_749_824,
    ),
    "mistral-7b-v0.1": ({"model_type": "mistral"}, 7_241_732_096),
    "qwen2.5-7b": (
        shape("qwen2", 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064),
        7_615_616_512,
    ),
    "qwen3-0.6b": (shape("qwen3", 1024, 3072, 28, 16, **QWEN3, **TIED), 596_049_920),
    "qwen3-8b": (shape("qwen3", 4096, 12288, 36, 32, **QWEN3), 8_190_735_360),
    "gpt2": ({"model_type": "gpt2"}, 124_439_808),
    "gpt2-xl": (
        {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
        1_557_611_200,
    ),
    "pythia-1.4b": (shape("gpt_neox", 2048, 8192, 24, 16, vocab_size=50304), 1_414_647_808),
    "gpt-neox-20b": ({"model_type": "gpt_neox"}, 20_554_567_680),
    "gemma-2-2b": ({"model_type": "gemma2"}, 2_614_341_888),
    "gemma-2-9b": (
        shape("gemma2", 3584, 14336, 42, 16, num_key_value_heads=8, head_dim=256),
        9_241_705_984,
    ),
    "gemma-3-1b": (
        shape("gemma3_text", 1152, 6912, 26, 4, num_key_value_heads=1, head_dim=256)
        | {"vocab_size": 262144},
        999_885_952,
    ),
    "glm-4-9b-0414": ({"model_type": "glm4"}, 9_400_279_040),
    "olmo-2-7b": (shape("olmo2", 4096, 11008, 32, 32, vocab_size=100352), 7_298_617_344),
    "olmo-2-32b": (
        shape("olmo2", 5120, 27648, 64, 40, num_key_value_heads=8, vocab_size=100352),
        32_234_279_936,
    ),
    "olmo-3-7b": (shape("olmo3", 4096, 11008, 32, 32, vocab_size=100278), 7_298_011_136),
    "mixtral-8x7b": ({"model_type": "mixtral"}, 46_702_792_704),
    "gpt-oss-120b": ({"model_type": "gpt_oss"}, 116_829_156_672),
    "llama-4-scout": ({"model_type": "llama4_text"}, 107_769_861_120),
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
    "qwen1.5-moe-a2.7b": ({"model_type": "qwen2_moe"}, 14_315_784_192),
    "qwen3-30b-a3b": (
        shape("qwen3_moe", 2048, 6144, 48, 32, num_key_value_heads=4, head_dim=128),
        30_532_122_624,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_published_number_of_parameters(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert assert_counts_match(config).parameters.total == parameters


def test_active_parameters_leave_out_the_experts_not_chosen() -> None:
    mixtral = spec_of(PUBLISHED["mixtral-8x7b"][0]).parameters
    assert mixtral.active == 12_879_925_248  # "12.9B active", Mixtral paper (2401.04088)
    qwen = spec_of(PUBLISHED["qwen3-30b-a3b"][0]).parameters  # "3.3B activated", model card
    assert qwen.active == qwen.total - 48 * (128 - 8) * 3 * 2048 * 768 == 3_353_032_704
    dense = spec_of(PUBLISHED["llama-3.1-8b"][0]).parameters
    assert dense.active == dense.total


def small(model_type: str, **more: Any) -> dict:
    return shape(model_type, 48, 56, 3, 4, vocab_size=96, **more)


GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 96}
MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
SHARED = MOE | {"shared_expert_intermediate_size": 20, "num_key_value_heads": 2}
GROUPED = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "num_key_value_heads": 2, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 6, "num_key_value_heads": 4,
}  # fmt: skip
LLAMA4 = {
    "num_key_value_heads": 2, "head_dim": 14, "num_local_experts": 4, "moe_layers": [1],
    "intermediate_size_mlp": 60, "attention_chunk_size": 20,
}  # fmt: skip
ODD = {
    "llama-biases": small("llama", attention_bias=True, mlp_bias=True),
    "llama-head-dim": small("llama", num_key_value_heads=2, head_dim=10, **TIED),
    "llama-null-kv": small("llama", num_key_value_heads=None, head_dim=None),
    "mistral-no-window": small("mistral", num_key_value_heads=1, sliding_window=None),
    "mistral-uneven-hidden": small("mistral", num_key_value_heads=2, head_dim=6)
    | {"hidden_size": 50},
    "qwen2": small("qwen2", num_key_value_heads=2, **TIED),
    "qwen2-head-dim": small("qwen2", num_key_value_heads=2, head_dim=16),
    "qwen3-bias": small("qwen3", num_key_value_heads=4, head_dim=6, attention_bias=True),
    "smollm3": small("smollm3", pad_token_id=None, num_key_value_heads=2, mlp_bias=True),
    "phi3": small("phi3", pad_token_id=None, num_key_value_heads=2, **TIED),
    "granite": small("granite", num_key_value_heads=2, mlp_bias=True, **TIED),
    "gpt2-inner": GPT2 | {"n_inner": 100, "n_positions": 40, "tie_word_embeddings": False},
    "gpt2-standard-names": {
        "model_type": "gpt2",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 24,
        "vocab_size": 96,
    },
    "gpt_neox-no-bias": small("gpt_neox", attention_bias=False, rotary_pct=0.5, **TIED),
    "gpt_oss": small("gpt_oss", num_key_value_heads=2, head_dim=14, num_local_experts=5),
    "llama4_text": small("llama4_text", **LLAMA4),
    "llama4_text-dense": small("llama4_text", **LLAMA4 | {"moe_layers": []}, **TIED),
    "llama4_text-bias": small(
        "llama4_text",
        attention_bias=True,
        interleave_moe_layer_step=2,
        num_local_experts=3,
        num_key_value_heads=4,
    ),
    "gpt_oss-no-bias": small(
        "gpt_oss", num_key_value_heads=2, head_dim=14, num_experts=4, attention_bias=False
    ),
    "gemma2": small("gemma2", num_key_value_heads=2, head_dim=14, tie_word_embeddings=False),
    "gemma2-bias": small("gemma2", num_key_value_heads=2, head_dim=14, attention_bias=True),
    "mixtral": small("mixtral", num_key_value_heads=2, num_local_experts=5),
    "mixtral-alias": small(
        "mixtral", num_key_value_heads=2, num_experts=3, num_experts_per_tok=1
    ),
    "deepseek_v3": small("deepseek_v3", first_k_dense_replace=1, **GROUPED | LATENT),
    "deepseek_v3-dense-queries": small(
        "deepseek_v3", **GROUPED | LATENT | {"q_lora_rank": None, "head_dim": 8}
    ),
    "glm4_moe-biases": small("glm4_moe", attention_bias=True, use_qk_norm=True, **GROUPED),
    "glm4_moe-dense": small("glm4_moe", first_k_dense_replace=3, **GROUPED),
    "qwen2_moe-dense-layers": small(
        "qwen2_moe", mlp_only_layers=[0, 2], qkv_bias=False, head_dim=8, **SHARED, **TIED
    ),
    "qwen2_moe-no-experts": small("qwen2_moe", decoder_sparse_step=4, **SHARED),
    "qwen3_moe": small("qwen3_moe", num_key_value_heads=2, **MOE),
    "qwen3_moe-alias": small(
        "qwen3_moe", moe_intermediate_size=24, num_local_experts=6, num_experts_per_tok=2
    ),
    "qwen3_moe-sparse-step": small("qwen3_moe", decoder_sparse_step=2, head_dim=8, **MOE),
    "qwen3_moe-dense-layers": small(
        "qwen3_moe", mlp_only_layers=[0, 2, 2], attention_bias=True, **MOE, **TIED
    ),
    "qwen3_moe-both": small("qwen3_moe", mlp_only_layers=[0, 1], decoder_sparse_step=2, **MOE)
    | {"num_hidden_layers": 5},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_shapes_are_counted_exactly(name: str) -> None:
    assert_counts_match(ODD[name])


SAID = [name for name in ODD if FAMILIES[ODD[name]["model_type"]].shape is None]
"""Models whose sizes say all of their parts."""


@pytest.mark.parametrize("name", SAID)
def test_counted_on_its_tensors_a_model_is_what_its_sizes_say(name: str) -> None:
    settings = settings_of(ODD[name])
    said, found = sizes(settings), counted_on_tensors(settings)
    assert found.counted is not None and found.parameters == said.parameters
    for length in (1, 100):
        flops = said.forward_flops_per_token(length, causal=True)
        assert found.forward_flops_per_token(length, causal=True) == flops


@st.composite
def small_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Small configs of every family, most of them legal."""
    model_type = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[model_type]
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    options: dict[str, Any] = {
        "hidden_size": heads * draw(st.sampled_from([2, 8, 10]))
        + draw(st.sampled_from([0, 0, 1])),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 3, heads])),
        "head_dim": draw(st.sampled_from([2, 5, 6, 8])),
        "intermediate_size": draw(st.integers(1, 40)),
        "n_inner": draw(st.sampled_from([None, 7, 40])),
        "vocab_size": draw(st.integers(1, 60)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "max_position_embeddings": draw(st.integers(1, 40)),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "use_sliding_window": draw(st.booleans()),
        "sliding_window": draw(st.sampled_from([None, 1, 4, 100])),
        "max_window_layers": draw(st.integers(0, 4)),
        "num_experts": draw(st.integers(1, 6)),
        "num_experts_per_tok": draw(st.integers(1, 4)),
        "moe_intermediate_size": draw(st.integers(1, 20)),
        "shared_expert_intermediate_size": draw(st.integers(1, 20)),
        "qkv_bias": draw(st.booleans()),
        "n_routed_experts": draw(st.integers(2, 6)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "n_group": draw(st.integers(1, 3)),
        "topk_group": draw(st.integers(1, 2)),
        "first_k_dense_replace": draw(st.integers(0, 5)),
        "use_qk_norm": draw(st.booleans()),
        "q_lora_rank": draw(st.sampled_from([None, 5])),
        "kv_lora_rank": draw(st.integers(1, 9)),
        "qk_nope_head_dim": draw(st.integers(1, 9)),
        "qk_rope_head_dim": draw(st.sampled_from([2, 4, 5])),
        "v_head_dim": draw(st.integers(1, 9)),
        "decoder_sparse_step": draw(st.integers(1, 3)),
        "mlp_only_layers": draw(st.lists(st.integers(0, 5), max_size=3)),
        "rotary_pct": draw(st.sampled_from([0.25, 0.5, 1.0, 0.0])),
        "no_rope_layer_interval": draw(st.integers(1, 4)),
        "interleave_moe_layer_step": draw(st.integers(1, 3)),
        "intermediate_size_mlp": draw(st.integers(1, 40)),
        "attention_chunk_size": draw(st.integers(1, 4)),
        "partial_rotary_factor": draw(st.sampled_from([0.5, 1.0])),
        "rope_theta": draw(st.sampled_from([10000.0, 500000])),
        "pad_token_id": draw(st.sampled_from([None, 0, -1, 20])),
    }
    chosen = {
        key: value
        for key, value in options.items()
        if family.aliases.get(key, key) in family.keys
    }
    always = {
        "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size",
        "num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok",
        "n_routed_experts",
    }  # fmt: skip
    left_out = draw(st.sets(st.sampled_from(sorted(chosen.keys() - always))))
    return {"model_type": model_type} | {
        key: value for key, value in chosen.items() if key not in left_out
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(small_configs())
def test_every_accepted_config_builds_trains_and_is_counted_exactly(config: Config) -> None:
    if check_config(config):
        return
    spec = assert_counts_match(config)
    built = transformers_config(config)
    built._experts_implementation = "eager"  # the grouped one wants sizes in 16-byte steps
    model = AutoModelForCausalLM.from_config(built)
    ids = torch.zeros(1, min(3, spec.max_positions), dtype=torch.long)
    model(ids, labels=ids).loss.backward()


# --- FLOPs ------------------------------------------------------------------------------


FLOP_CASES = {
    "llama": small("llama", num_key_value_heads=2, attention_bias=True),
    "llama-head-dim": small("llama", num_key_value_heads=2, head_dim=10),
    "qwen2": small("qwen2", num_key_value_heads=2, **TIED),
    "qwen3": small("qwen3", num_key_value_heads=2, head_dim=20),
    "gpt2": GPT2,
    "gpt_neox": small("gpt_neox", rotary_pct=0.5),
    "gemma2": small("gemma2", num_key_value_heads=2, head_dim=14),
    "gemma3_text": small("gemma3_text", num_key_value_heads=2, head_dim=14),
    "glm4": small("glm4", num_key_value_heads=2, head_dim=20, pad_token_id=None),
    "olmo2": small("olmo2", num_key_value_heads=2),
    "olmo3": small("olmo3", num_key_value_heads=2),
    "mistral": small("mistral", num_key_value_heads=2),
    "granite": small("granite", num_key_value_heads=2),
    "phi3": small("phi3", num_key_value_heads=2, pad_token_id=None),
    "smollm3": small("smollm3", num_key_value_heads=2, pad_token_id=None),
    "mixtral": small("mixtral", num_key_value_heads=2),
    "gpt_oss": small("gpt_oss", num_key_value_heads=2, num_local_experts=4, head_dim=14),
    # transformers computes all experts on every token.
    "llama4_text": small("llama4_text", **LLAMA4 | {"num_experts_per_tok": 4}),
    "deepseek_v3": small("deepseek_v3", first_k_dense_replace=1, **GROUPED | LATENT),
    "glm4_moe": small("glm4_moe", **GROUPED),
    "qwen2_moe": small("qwen2_moe", mlp_only_layers=[1], **SHARED),
    "qwen3_moe": small("qwen3_moe", num_key_value_heads=2, mlp_only_layers=[1], **MOE),
}


def measured_flops(
    config: Config, sequence: int, *, backward: bool, freeze: Sequence[str] = ()
) -> int:
    """FLOPs that torch counts in the eager model, rotary tables left out."""
    built = transformers_config(config)
    built._attn_implementation = "eager"
    built._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(built)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, one) for one in freeze))
    if freeze == ["*"]:  # adapters in every layer
        model.enable_input_require_grads()
    batch = 2
    ids = torch.randint(0, 90, (batch, sequence))
    counter = FlopCounterMode(display=False)
    with counter:
        logits = model(ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    by_module = counter.get_flop_counts()
    rotary = sum(
        sum(counts.values()) for name, counts in by_module.items() if "rotary_emb" in name
    )
    total = counter.get_total_flops() - rotary
    assert total % batch == 0
    return total // batch


@pytest.mark.parametrize("name", FLOP_CASES)
def test_forward_flops_are_what_torch_counts_in_the_eager_model(name: str) -> None:
    config, sequence = FLOP_CASES[name], 16
    ours = spec_of(config).forward_flops_per_token(sequence, causal=False) * sequence
    assert ours == measured_flops(config, sequence, backward=False)


def test_training_flops_are_what_torch_counts_forward_and_backward() -> None:
    config, sequence = FLOP_CASES["llama"], 16
    ours = spec_of(config).flops_per_token(sequence, causal=False) * sequence
    assert ours == measured_flops(config, sequence, backward=True)


@pytest.mark.parametrize(
    "freeze",
    [
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
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_flops_with_frozen_weights_are_what_torch_counts(name: str, freeze: list[str]) -> None:
    config, sequence = FLOP_CASES[name], 16
    if freeze == ["*"]:
        spec = dataclasses.replace(spec_of(config), adapters=AdapterParameters(1, 1))
    else:
        spec = frozen_spec_of(config, freeze)
    ours = spec.flops_per_token(sequence, causal=False) * sequence
    found = measured_flops(config, sequence, backward=True, freeze=freeze)
    assert ours == pytest.approx(found, rel=0.01)  # biases count as weights


def test_causal_flops_count_the_pairs_that_the_mask_leaves() -> None:
    for window in (None, 1, 5, 16, 40):
        config = small("mistral", num_key_value_heads=2, sliding_window=window)
        spec, sequence = spec_of(config), 16
        pairs = sum(min(position + 1, window or sequence) for position in range(sequence))
        per_pair = 4 * spec.heads * spec.head_dim * spec.layers
        all_pairs = sequence * min(window or sequence, sequence)
        weights_only = (
            spec.forward_flops_per_token(sequence, causal=False) * sequence
            - per_pair * all_pairs
        )
        causal = spec.forward_flops_per_token(sequence, causal=True) * sequence
        assert causal == pytest.approx(weights_only + per_pair * pairs, rel=1e-12)


def test_flops_agree_with_the_formula_of_korthikanti_and_others() -> None:
    # arXiv:2205.05198, appendix A: 72·B·L·s·h²·(1 + s/6h + v/12hL); the GPT-3 row of table 3.
    layers, hidden, sequence, vocab = 96, 12288, 2048, 51200
    config = {
        "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": 96,
        "vocab_size": vocab, "n_positions": sequence,
    }  # fmt: skip
    formula = 72 * layers * hidden**2 * (
        1 + sequence / (6 * hidden) + vocab / (12 * hidden * layers)
    )  # fmt: skip
    assert spec_of(config).flops_per_token(sequence, causal=False) == pytest.approx(
        formula, rel=1e-12
    )


def test_llama_3_8b_flops_agree_with_6n_plus_attention() -> None:
    # PaLM appendix B: 6·N + 12·L·H·Q·T with N leaving out the embedding lookup.
    spec = spec_of(PUBLISHED["llama-3.1-8b"][0])
    matrices = spec.parameters.total - spec.parameters.embedding - spec.parameters.norms
    expected = 6 * matrices + 12 * 32 * 32 * 128 * 8192
    assert spec.flops_per_token(8192, causal=False) == expected
    assert spec.flops_per_token(8192, causal=True) < expected


@pytest.mark.parametrize("sequence", [0, -1])
def test_a_sequence_without_tokens_has_no_flops_per_token(sequence: int) -> None:
    with pytest.raises(ValueError, match="sequence_length"):
        spec_of(GPT2).flops_per_token(sequence, causal=True)


# --- sliding windows --------------------------------------------------------------------


WINDOWS = {
    "mistral-default": ({"model_type": "mistral"}, 4096, 32),
    "mistral-null": ({"model_type": "mistral", "sliding_window": None}, None, 0),
    "mixtral-default": ({"model_type": "mixtral"}, None, 0),
    "qwen2-off": ({"model_type": "qwen2"}, None, 0),
    "qwen2-on": ({"model_type": "qwen2", "use_sliding_window": True}, 4096, 4),
    "qwen3-types": (
        small(
            "qwen3", use_sliding_window=True, num_key_value_heads=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        4096,
        2,
    ),
    "qwen2_moe-off": ({"model_type": "qwen2_moe"}, None, 0),
    "qwen2_moe-on": ({"model_type": "qwen2_moe", "use_sliding_window": True}, 4096, 12),
    "qwen3_moe-on": ({"model_type": "qwen3_moe", "use_sliding_window": True}, 4096, 24),
    "gemma3_text-default": ({"model_type": "gemma3_text"}, 4096, 22),
    "gemma3_text-pattern": (
        {"model_type": "gemma3_text", "sliding_window_pattern": 2}, 4096, 13
    ),
    "olmo3-default": ({"model_type": "olmo3"}, 4096, 24),
    "llama4_text-default": ({"model_type": "llama4_text"}, 8192, 36),
    "llama4_text-all-turned": (
        {"model_type": "llama4_text", "no_rope_layer_interval": 49}, 8192, 48
    ),
    "gpt_oss-default": ({"model_type": "gpt_oss"}, 128, 18),
    "gemma2-default": ({"model_type": "gemma2"}, 4096, 13),
    "gemma2-odd-layers": ({"model_type": "gemma2", "num_hidden_layers": 5}, 4096, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_layers_are_those_of_transformers(name: str) -> None:
    config, window, layers = WINDOWS[name]
    spec = spec_of(config)
    assert (spec.sliding_window, spec.sliding_layers) == (window, layers)
    theirs = transformers_config(config)
    types = getattr(theirs, "layer_types", None)
    if types is not None:
        assert len(types) - types.count("full_attention") == layers
    else:
        assert (theirs.sliding_window or None) == window


@pytest.mark.parametrize("sequence", [3, 4, 11])
def test_causal_flops_of_chunks_count_the_pairs_inside_them(sequence: int) -> None:
    kinds = {"attention_chunk_size": 4, "no_rope_layers": [1, 0, 1]}
    spec = spec_of(small("llama4_text", **LLAMA4 | kinds))
    place = torch.arange(sequence)
    past = place[:, None] >= place
    chunked = past & (place[:, None] // 4 == place // 4)
    pairs = int(spec.sliding_layers * chunked.sum() + past.sum())
    per_pair, weights = 4 * spec.heads * spec.head_dim, spec.counted.flops * sequence
    assert (spec.layers, spec.sliding_layers) == (3, 2)
    causal = spec.forward_flops_per_token(sequence, causal=True) * sequence
    assert causal == pytest.approx(weights + per_pair * pairs, rel=1e-12)
