"""GLM-4-MoE (GLM-4.5): llama with positions that turn half of each head, optional query and key
norms, and DeepSeek-V3's experts."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_keys import (
    FLAG,
    POSITIVE_FLOAT,
    SIZE,
    TOKEN,
    TOKENS,
    UNIT_FLOAT,
    Key,
    without,
)
from toolkit.models.families import common, deepseek_experts, glm4, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.shape import counted
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **without(llama.KEYS, "pretraining_tp", "mlp_bias"),
    **deepseek_experts.KEYS,
    "vocab_size": Key(SIZE, 151552),
    "intermediate_size": Key(SIZE, 10944),
    "num_hidden_layers": Key(SIZE, 46),
    "num_attention_heads": Key(SIZE, 96),
    "num_key_value_heads": Key(SIZE, 8),
    "head_dim": Key(SIZE),
    "max_position_embeddings": Key(SIZE, 131072),
    "rms_norm_eps": Key(POSITIVE_FLOAT, 1e-5),
    "bos_token_id": Key(TOKEN, nullable=True),
    "eos_token_id": Key(TOKENS, nullable=True),
    "partial_rotary_factor": Key(UNIT_FLOAT, 0.5),
    "use_qk_norm": Key(FLAG, False),
}


def shape(settings: Settings) -> ModelSpec:
    """`attention_bias` is on query, key and value alone."""
    spec = glm4.without_output_bias(settings)
    spec = replace(spec, query_key_norm=settings["use_qk_norm"])
    return counted(settings, deepseek_experts.shape(spec, settings))


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """GLM-4-MoE as a megatron-core GPTModel."""
    rotary = common.rotary(settings, share=settings["partial_rotary_factor"])
    dense = MegatronModel(
        llama.decoder_transformer(spec, settings),
        common.gpt(spec) | rotary,
        (*llama.outer_tensors(spec), *llama.attention_tensors(spec)),
    )
    return deepseek_experts.with_experts(dense, spec, settings)


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this glm4_moe; None when it can."""
    return common.first_reason(
        deepseek_experts.unsupported_router(spec, settings), llama.unsupported(spec, settings)
    )


GLM4_MOE = Family(
    "glm4_moe",
    KEYS,
    model,
    unsupported,
    aliases=deepseek_experts.ALIASES,
    standard=deepseek_experts.STANDARD,
    shape=shape,
)
