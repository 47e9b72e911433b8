"""Llama, and the dense families whose layers differ from its in keys and traits alone."""

from dataclasses import replace
from typing import Any

from toolkit.models.config_keys import SIZE, TEXT, Key, Kind, keys_of
from toolkit.models.families import common, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.shape import counted
from toolkit.models.spec import ModelSpec


def upper_layers(settings: Settings) -> range:
    """The layers above the first `max_window_layers`."""
    return range(settings["max_window_layers"], settings["num_hidden_layers"])


def even_layers(settings: Settings) -> range:
    """Every other layer, beginning with the first."""
    return range(0, settings["num_hidden_layers"], 2)


def _all_but_last_of(pattern: int, settings: Settings) -> list[int]:
    return [layer for layer in range(settings["num_hidden_layers"]) if (layer + 1) % pattern]


def _gemma(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Gemma as a megatron-core GPTModel: norms of weight 1 + w, scaled embeddings."""
    plain = llama.model(spec, settings)
    norms = {"layernorm_zero_centered_gamma": True}
    return replace(
        plain,
        transformer={**plain.transformer, **norms},
        embedding_scale=spec.hidden**0.5,
    )


def _unsupported_phi3(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this phi3; None when it can."""
    dropouts = None
    if common.dropout(settings, "resid_pdrop"):
        dropouts = "resid_pdrop: megatron-core's dropout of the residual also drops embeddings"
    return common.first_reason(dropouts, llama.unsupported(spec, settings))


def _like_llama(model_type: str, own: dict[str, Any] | None = None, **traits: Any) -> Family:
    """A family with llama's layers; `own` keys: see `keys_of`."""
    functions = {"model": llama.model, "unsupported": llama.unsupported} | traits
    return Family(model_type, keys_of(model_type, **own or {}), **functions)


_OLMO_NORMS = {
    "self_attn_bda.norm": "post_attention_layernorm",
    "mlp_bda.norm": "post_feedforward_layernorm",
}
_GLM4_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attn_bda.norm": "post_self_attn_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp_bda.norm": "post_mlp_layernorm",
}
_GEMMA_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attn_bda.norm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "mlp_bda.norm": "post_feedforward_layernorm",
}
_NO_BIASES = Kind("false (phi3 has no biases)", lambda v: v is False)
UNREAD = Kind("null (transformers caps no scores of gemma3_text)", lambda v: v is None)
_PRETRAINING_TP = Key(SIZE, 1, nullable=True)
_CACHE = Key(TEXT, nullable=True)

LLAMA_LIKE = (
    _like_llama("llama", strict_heads=True),
    # Every layer may see a sliding window only.
    _like_llama("mistral"),
    _like_llama("qwen2", {"head_dim": None}, qkv_bias=True, sliding=upper_layers),
    _like_llama("qwen3", query_key_norm=True, sliding=upper_layers),
    # Factors of embeddings, attention scores, residual branches and logits: by its keys.
    _like_llama("granite", {"head_dim": None, "pretraining_tp": _PRETRAINING_TP}),
    # Some layers do not turn by positions; those may slide.
    _like_llama(
        "smollm3",
        {
            "head_dim": None,
            "pretraining_tp": _PRETRAINING_TP,
            "max_window_layers": None,  # transformers reads it nowhere
        },
        theta=2e6,
        sliding=common.layers_without_rotary,
    ),
    # Phi-3 and Phi-4.
    _like_llama(
        "phi3",
        {"attention_bias": Key(_NO_BIASES, False), "partial_rotary_factor": 1.0},
        unsupported=_unsupported_phi3,
        rope_types=("default", "longrope"),
        fused_qkv=True,
        fused_gate_up=True,
    ),
    # Half of each head turns by positions; `attention_bias` is of query, key and value alone.
    _like_llama(
        "glm4",
        {"partial_rotary_factor": 0.5},
        norms=_GLM4_NORMS,
        attention_output_bias=False,
        fused_gate_up=True,
        interleaved=True,
    ),
    _like_llama(
        "olmo2",
        norms=_OLMO_NORMS,
        query_key_norm=True,
        norms_over_width=True,
        shape=counted,
    ),
    # Three of four layers slide, and may turn by positions differently.
    _like_llama(
        "olmo3",
        {"sliding_window": Key(SIZE, 4096)},
        norms=_OLMO_NORMS,
        query_key_norm=True,
        norms_over_width=True,
        shape=counted,
        sliding=lambda settings: _all_but_last_of(4, settings),
        rope_types=("default", "linear", "yarn", "llama3"),
        rope_bases={"full_attention": 500_000.0, "sliding_attention": 500_000.0},
    ),
    # Soft-capped scores and logits.
    _like_llama(
        "gemma2",
        {
            "hidden_act": None,  # in published configs; transformers reads hidden_activation
            "sliding_window": Key(SIZE, 4096),
            "cache_implementation": _CACHE,
        },
        model=_gemma,
        strict_heads=True,
        attention=lambda _: "eager",  # sdpa has no soft-capping
        norms=_GEMMA_NORMS,
        wide_norms=True,
        sliding=even_layers,
    ),
    # Five of six layers are local, with a different rotary base.
    _like_llama(
        "gemma3_text",
        {
            "attn_logit_softcapping": Key(UNREAD, nullable=True),
            "sliding_window": Key(SIZE, 4096),
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": None,  # in published configs, next to layer_types
            "rope_local_base_freq": None,
            "cache_implementation": _CACHE,
        },
        model=_gemma,
        strict_heads=True,
        query_key_norm=True,
        norms=_GEMMA_NORMS,
        wide_norms=True,
        sliding=lambda settings: _all_but_last_of(settings["sliding_window_pattern"], settings),
        rope_types=("default", "linear", "yarn", "llama3"),
        rope_bases={"full_attention": 1_000_000.0, "sliding_attention": 10_000.0},
    ),
)
