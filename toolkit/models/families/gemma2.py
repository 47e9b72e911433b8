"""Gemma 2: llama with norms around attention and MLP, soft-capped scores and logits, norms of
weight 1 + w and scaled embeddings."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_keys import (
    ACTIVATION,
    FALSE,
    FLAG,
    LAYER_TYPES,
    POSITIVE_FLOAT,
    SIZE,
    TEXT,
    TOKEN,
    TOKENS,
    Key,
    without,
)
from toolkit.models.families import common, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **without(llama.KEYS, "pretraining_tp", "mlp_bias"),
    "vocab_size": Key(SIZE, 256000),
    "hidden_size": Key(SIZE, 2304),
    "intermediate_size": Key(SIZE, 9216),
    "num_hidden_layers": Key(SIZE, 26),
    "num_attention_heads": Key(SIZE, 8),
    "num_key_value_heads": Key(SIZE, 4),
    "head_dim": Key(SIZE, 256),
    "hidden_act": Key(ACTIVATION),  # in published configs; transformers reads the next one
    "hidden_activation": Key(ACTIVATION, "gelu_pytorch_tanh"),
    "max_position_embeddings": Key(SIZE, 8192),
    "pad_token_id": Key(TOKEN, 0, nullable=True),
    "eos_token_id": Key(TOKENS, 1, nullable=True),
    "bos_token_id": Key(TOKEN, 2, nullable=True),
    "tie_word_embeddings": Key(FLAG, True),
    "query_pre_attn_scalar": Key(SIZE, 256),
    "sliding_window": Key(SIZE, 4096),
    "layer_types": Key(LAYER_TYPES, nullable=True),
    "final_logit_softcapping": Key(POSITIVE_FLOAT, 30.0, nullable=True),
    "attn_logit_softcapping": Key(POSITIVE_FLOAT, 50.0, nullable=True),
    "use_bidirectional_attention": Key(FALSE, nullable=True),
    "cache_implementation": Key(TEXT, nullable=True),
}


def even_layers(settings: Settings) -> range:
    """Every other layer, beginning with the first."""
    return range(0, settings["num_hidden_layers"], 2)


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Gemma 2 as a megatron-core GPTModel."""
    plain = llama.model(spec, settings)
    norms = {
        "input_layernorm": "input_layernorm",
        "self_attn_bda.norm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    }
    tensors = (
        *llama.outer_tensors(spec),
        *llama.layer_norms(spec, norms),
        *llama.projections(spec),
        *llama.mlp_tensors(spec),
    )
    fields = {
        "activation_func": common.HF_ACTIVATIONS.get(settings["hidden_activation"]),
        "softmax_scale": settings["query_pre_attn_scalar"] ** -0.5,
        "layernorm_zero_centered_gamma": True,
    }
    return replace(
        plain,
        transformer={**plain.transformer, **fields},
        tensors=tensors,
        norms="both",
        score_cap=settings["attn_logit_softcapping"],
        logit_cap=settings["final_logit_softcapping"],
        embedding_scale=spec.hidden**0.5,
    )


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this model; None when it can."""
    return common.first_reason(
        common.unsupported_biases(spec),
        common.unsupported_activation(settings["hidden_activation"]),
    )


GEMMA2 = Family(
    "gemma2",
    KEYS,
    model,
    unsupported,
    strict_heads=True,
    attention=lambda _: "eager",  # sdpa has no soft-capping
    norms_per_layer=4,
    wide_norms=True,
    sliding=even_layers,
)
