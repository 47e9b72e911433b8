"""Olmo2: llama with norms on what attention and MLP return, and on whole queries and keys."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_keys import POSITIVE_FLOAT, SIZE, TOKEN, TOKENS, Key, without
from toolkit.models.families import llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.shape import counted
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **without(llama.KEYS, "pretraining_tp", "mlp_bias", "head_dim"),
    "vocab_size": Key(SIZE, 50304),
    "rms_norm_eps": Key(POSITIVE_FLOAT, 1e-5),
    "pad_token_id": Key(TOKEN, 1, nullable=True),
    "bos_token_id": Key(TOKEN, nullable=True),
    "eos_token_id": Key(TOKENS, 50279, nullable=True),
}


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Olmo2 as a megatron-core GPTModel."""
    norms = {
        "self_attn_bda.norm": "post_attention_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    }
    widths = {"q": spec.heads * spec.head_dim, "k": spec.kv_heads * spec.head_dim}
    tensors = (
        *llama.outer_tensors(spec),
        *llama.layer_norms(spec, norms),
        *llama.projections(spec),
        *llama.query_key_norms(widths),
        *llama.mlp_tensors(spec),
    )
    plain = llama.model(spec, settings)
    return replace(plain, tensors=tensors, norms="after", norms_over_width=True)


OLMO2 = Family("olmo2", KEYS, model, llama.unsupported, shape=counted, query_key_norm=True)
