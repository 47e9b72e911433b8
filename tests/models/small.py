"""The smallest sensible model of every causal language model type of transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from toolkit.models import families
from toolkit.models import huggingface as hf
from toolkit.models.judge import known_keys
from toolkit.recipe.schema import ModelSection

FAMILIES = (*families.FAMILIES, "llama4_text")
"""Those that megatron-core can compute, and one that attends within chunks."""
VOCABULARY = 101
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "d_model": 64,
    "num_hidden_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 1,
    "num_attention_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "decoder_ffn_dim": 128, "encoder_ffn_dim": 128,
    "ffn_dim": 128, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "sliding_window": 8,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "embedding_size": 64, "rotary_dim": 8,
}  # fmt: skip
"""What a config class calls its sizes, and how large they are here."""
FOUR_LAYERS = {"num_hidden_layers": 4}
"""One with attention among those with a recurrent state."""
ONE_OF_EACH = {"layer_types": ["linear_attention", "full_attention"]}
_PART = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "hidden_size_global": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
"""The sizes of a config that is a part of another one."""
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"max_position_embeddings": 64, "encoder_hash_byte_group_vocab": 100} | {
        f"{part}_config": _PART for part in ("patcher", "encoder", "decoder", "global")
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
    }}},
    "deepseek_v3": {"first_k_dense_replace": 1, "v_head_dim": 12},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None},
    "falcon_h1": {
        "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "fuyu": {
        "image_size": 32, "patch_size": 8, "text_config": {"model_type": "persimmon", **_PART},
    },
    "gemma3_text": {"sliding_window": 3, "sliding_window_pattern": 2, "rope_theta": 500},
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    "glm4_moe_lite": {"head_dim": None, "num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite": {"residual_multiplier": 0.22, "logits_scaling": 8.0},
    "granitemoehybrid": ONE_OF_EACH,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"head_dim": None},
    "kimi_linear": ONE_OF_EACH,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama": {"tie_word_embeddings": True},
    "llama4_text": {
        "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2,
        "intermediate_size_mlp": 96, "attention_chunk_size": 3, "floor_scale": 2,
    },
    "longcat_flash": {
        "head_dim": 8, "num_layers": 1, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32,
        "moe_topk": 2, "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
    "olmo_hybrid": FOUR_LAYERS,
    "phimoe": {"router_jitter_noise": 0.0},  # else it draws experts at random
    "qwen3_5_moe_text": FOUR_LAYERS,
    "qwen3_5_text": FOUR_LAYERS,
    "qwen3_next": FOUR_LAYERS,
    "qwen4_exp_text": FOUR_LAYERS | {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "smollm3": {"no_rope_layer_interval": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": FOUR_LAYERS | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What single types need besides; None: the key is left out."""


def tiny(model_type: str) -> dict[str, Any]:
    """The smallest sensible config of a type."""
    aliases, known = CONFIG_MAPPING[model_type].attribute_map, known_keys(model_type)
    sizes = {n: size for n, size in SIZES.items() if n in known and n not in aliases}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    sizes |= {own: SIZES[name] for name, own in aliases.items() if name in SIZES}
    config = {"model_type": model_type, **sizes, **SPECIAL.get(model_type, {})}
    return {name: value for name, value in config.items() if value is not None}


def section(family: str, **extra: Any) -> ModelSection:
    return ModelSection(config=tiny(family) | extra)


def filled(model: ModelSection, seed: int = 1) -> Any:
    config = hf.build_config(model)
    built = hf.empty_model(config, torch.device("cpu"))
    hf.fill(built, hf.weight_source(model, config, seed))
    return built
