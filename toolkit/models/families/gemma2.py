"""Gemma 2, which megatron-core cannot express: refused with the reason."""

from collections.abc import Mapping

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
from toolkit.models.families.tensors import whole
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
    """Names and shapes of the tensors: llama's, and two more norms in every layer."""
    del settings
    norms = [
        whole(f"{llama.LAYER}.{norm}.weight", f"{llama.HF_LAYER}.{norm}.weight", spec.hidden)
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    ]
    tensors = (*llama.decoder_tensors(spec), *norms)
    return MegatronModel(common.transformer(spec), common.gpt(spec), tensors)


def unsupported(spec: ModelSpec, settings: Settings) -> str:
    """Why megatron-core cannot compute any gemma2."""
    del spec, settings
    return (
        "megatron-core's layer has no norms after attention and MLP and no soft-capping of "
        "attention scores and logits, which gemma2 needs"
    )


GEMMA2 = Family(
    "gemma2",
    KEYS,
    model,
    unsupported,
    strict_heads=True,
    attention=lambda _: "eager",  # sdpa has no soft-capping
    norms_per_layer=4,
    sliding=even_layers,
)
