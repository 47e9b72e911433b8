"""GLM-4: llama with norms before and after attention and MLP, of whose heads one half turns by
positions, in pairs of neighbours."""

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
from toolkit.models.families import common, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.shape import sizes
from toolkit.models.families.tensors import gated
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **without(llama.KEYS, "pretraining_tp", "mlp_bias"),
    "vocab_size": Key(SIZE, 151552),
    "intermediate_size": Key(SIZE, 13696),
    "num_hidden_layers": Key(SIZE, 40),
    "num_key_value_heads": Key(SIZE, 2),
    "head_dim": Key(SIZE, 128),
    "max_position_embeddings": Key(SIZE, 131072),
    "rms_norm_eps": Key(POSITIVE_FLOAT, 1.5625e-7),
    "attention_bias": Key(FLAG, True),
    "partial_rotary_factor": Key(UNIT_FLOAT, 0.5),
    "pad_token_id": Key(TOKEN, 151329, nullable=True),
    "bos_token_id": Key(TOKEN, nullable=True),
    "eos_token_id": Key(TOKENS, nullable=True),
}


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """GLM-4 as a megatron-core GPTModel."""
    plain = llama.model(spec, settings)
    after = {
        "self_attn_bda.norm": "post_self_attn_layernorm",
        "mlp_bda.norm": "post_mlp_layernorm",
    }
    gate_up = f"{llama.HF_LAYER}.mlp.gate_up_proj.weight"
    fused = gated(
        f"{llama.LAYER}.mlp.linear_fc1.weight", gate_up, gate_up, spec.intermediate, spec.hidden
    )
    tensors = [fused if one.name == fused.name else one for one in plain.tensors]
    return replace(
        plain,
        transformer={**plain.transformer, "rotary_interleaved": True},
        gpt={**plain.gpt, **common.rotary(settings, share=settings["partial_rotary_factor"])},
        tensors=(*tensors, *llama.layer_norms(spec, after)),
        norms="both",
    )


def without_output_bias(settings: Settings) -> ModelSpec:
    """The model's shape: `attention_bias` is of query, key and value alone."""
    return replace(sizes(settings), attention_output_bias=False)


GLM4 = Family(
    "glm4", KEYS, model, llama.unsupported, shape=without_output_bias, norms_per_layer=4
)
