"""A small config of every family, and keys that change the function."""

from typing import Any

from toolkit.models.model import check_config

LAYERS = 4

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}

GPT2 = {
    "n_embd": 64, "n_head": 8, "n_layer": LAYERS, "n_positions": 32, "vocab_size": 101,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

MOE = SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

SHARED = MOE | {"shared_expert_intermediate_size": 48}

GROUPED = SMALL | {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip

LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama tied with biases": SMALL
    | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": SMALL | {"head_dim": 16},
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 16},
    "smollm3": SMALL | {"pad_token_id": 3, "no_rope_layer_interval": 2},
    "phi3": SMALL | {"pad_token_id": 3, "num_key_value_heads": 2},
    "granite": SMALL
    | {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
    },
    "gpt2": GPT2,
    "gpt2 untied": GPT2 | {"tie_word_embeddings": False, "n_inner": 96},
    "gpt_neox": NEOX,
    "gpt_neox tied": NEOX | {"tie_word_embeddings": True},
    "mixtral": SMALL | {"num_local_experts": 4},
    "gemma2": SMALL | {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    "gemma3_text": SMALL
    | {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 3, "rope_theta": 500},
    "glm4": SMALL | {"head_dim": 16, "pad_token_id": 3},
    "olmo2": SMALL,
    "olmo3": SMALL | {"sliding_window": 5},
    "deepseek_v3": GROUPED | LATENT | {"first_k_dense_replace": 1},
    "deepseek_v3 queries at once": GROUPED
    | LATENT
    | {"first_k_dense_replace": 0, "q_lora_rank": None},
    "gpt_oss": SMALL
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 5}
    | {"swiglu_limit": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "glm4_moe": GROUPED | {"use_qk_norm": True, "head_dim": 16},
    "glm4_moe without groups": SMALL
    | {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 3,
        "attention_bias": True,
        "partial_rotary_factor": 1.0,
    },
    "qwen2_moe": SHARED,
    "qwen2_moe partly dense": SHARED
    | {"mlp_only_layers": [0, 2], "qkv_bias": False, "norm_topk_prob": True, "head_dim": 16},
    "qwen3_moe": MOE,
    "qwen3_moe partly dense": MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
}


def config_of(case: str, **changes: Any) -> dict[str, Any]:
    """A small config of the case's family, checked."""
    config = {"model_type": case.split()[0], **CONFIGS[case], **changes}
    assert check_config(config) == []
    return config


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 12},
    "longrope": {
        "short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [1.0, 2.0, 4.0, 8.0],
        "factor": 4.0, "original_max_position_embeddings": 12,
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
        "original_max_position_embeddings": 12,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip
"""Every scaling that transformers has, for heads of 8 and sequences of 16: the length of logits
is beyond the original one, the positions of losses, which restart, are not."""


def scaled(rope_type: str, **more: Any) -> dict[str, Any]:
    """Keys of a config with this scaling; what the length decides, 16 decides."""
    rope = {"rope_type": rope_type, **ROPES[rope_type], **more}
    return {"rope_parameters": rope, "max_position_embeddings": 12}
