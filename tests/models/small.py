"""The smallest model of every family, filled."""

from typing import Any

import torch

from toolkit.models import huggingface as hf
from toolkit.recipe.schema import ModelSection

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"tie_word_embeddings": True},
    "mistral": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL,
    "smollm3": SMALL | {"no_rope_layer_interval": 2},
    "phi3": SMALL,
    "granite": SMALL | {"residual_multiplier": 0.22, "logits_scaling": 8.0},
    "gpt2": {
        "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "deepseek_v3": SMALL | {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "glm4_moe": SMALL | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "gpt_oss": SMALL | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": SMALL | {"head_dim": 16},
    "gemma3_text": SMALL | {
        "head_dim": 16, "sliding_window": 3, "sliding_window_pattern": 2, "rope_theta": 500,
    },
    "glm4": SMALL | {"head_dim": 16},
    "llama4_text": SMALL | {
        "head_dim": 16, "num_local_experts": 4, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 3,
        "floor_scale": 2,
    },
    "olmo2": SMALL,
    "olmo3": SMALL | {"sliding_window": 3},
    "mixtral": SMALL | {"num_local_experts": 4},
    "qwen2_moe": SMALL | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": SMALL | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip


def section(family: str, **extra: Any) -> ModelSection:
    return ModelSection(config={"model_type": family, **FAMILIES[family], **extra})


def filled(model: ModelSection, seed: int = 1) -> Any:
    config = hf.build_config(model)
    built = hf.empty_model(config, torch.device("cpu"))
    hf.fill(built, hf.weight_source(model, config, seed))
    return built
