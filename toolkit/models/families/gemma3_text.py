"""Gemma 3's text model: gemma2 with norms of query and key heads, and with five of six layers
local, with a different rotary base."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_keys import FALSE, POSITIVE, POSITIVE_FLOAT, SIZE, Key, Kind, without
from toolkit.models.families import common, gemma2, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.spec import ModelSpec

UNREAD = Kind("null (transformers caps no scores of gemma3_text)", lambda v: v is None)

KEYS: Mapping[str, Key] = {
    **without(gemma2.KEYS, "hidden_act"),
    "vocab_size": Key(SIZE, 262_208),
    "max_position_embeddings": Key(SIZE, 131_072),
    "final_logit_softcapping": Key(POSITIVE_FLOAT, nullable=True),
    "attn_logit_softcapping": Key(UNREAD, nullable=True),
    "use_bidirectional_attention": Key(FALSE, False, nullable=True),
    "sliding_window_pattern": Key(SIZE, 6),
    "_sliding_window_pattern": Key(SIZE),  # in published configs, next to layer_types
    "rope_local_base_freq": Key(POSITIVE),
}


def local_layers(settings: Settings) -> list[int]:
    """Every layer but the last of each `sliding_window_pattern`."""
    pattern = settings["sliding_window_pattern"]
    return [layer for layer in range(settings["num_hidden_layers"]) if (layer + 1) % pattern]


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Gemma 3 as a megatron-core GPTModel."""
    plain = gemma2.model(spec, settings)
    norms = llama.query_key_norms({"q": spec.head_dim, "k": spec.head_dim})
    gpt = {**plain.gpt, **common.layered_rotary(settings)}
    return replace(plain, gpt=gpt, tensors=(*plain.tensors, *norms))


GEMMA3_TEXT = Family(
    "gemma3_text",
    KEYS,
    model,
    gemma2.unsupported,
    strict_heads=True,
    query_key_norm=True,
    norms_per_layer=4,
    wide_norms=True,
    sliding=local_layers,
    rope_types=("default", "linear", "yarn", "llama3"),
    rope_bases={"full_attention": 1_000_000.0, "sliding_attention": 10_000.0},
)
