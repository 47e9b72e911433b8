"""Qwen2: llama with biases on query, key and value; the upper layers may slide."""

from collections.abc import Mapping

from toolkit.models.config_keys import (
    COUNT,
    FLAG,
    LAYER_TYPES,
    SIZE,
    TOKEN,
    TOKENS,
    Key,
    without,
)
from toolkit.models.families import llama
from toolkit.models.families.base import Family, Settings

KEYS: Mapping[str, Key] = {
    **without(llama.KEYS, "pretraining_tp", "attention_bias", "mlp_bias"),
    "vocab_size": Key(SIZE, 151936),
    "intermediate_size": Key(SIZE, 22016),
    "num_key_value_heads": Key(SIZE, 32, nullable=True),
    "head_dim": Key(SIZE),
    "max_position_embeddings": Key(SIZE, 32768),
    "bos_token_id": Key(TOKEN, nullable=True),
    "eos_token_id": Key(TOKENS, nullable=True),
    "use_sliding_window": Key(FLAG, False),
    "sliding_window": Key(SIZE, 4096, nullable=True),
    "max_window_layers": Key(COUNT, 28),
    "layer_types": Key(LAYER_TYPES, nullable=True),
}


def upper_layers(settings: Settings) -> range:
    """The layers above the first `max_window_layers`."""
    return range(settings["max_window_layers"], settings["num_hidden_layers"])


QWEN2 = Family(
    "qwen2", KEYS, llama.model, llama.unsupported, qkv_bias=True, sliding=upper_layers
)
