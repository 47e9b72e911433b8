"""Qwen3: qwen2 with query and key norms instead of biases and its own head size."""

from collections.abc import Mapping

from toolkit.models.config_keys import FLAG, SIZE, Key
from toolkit.models.families import llama, qwen2
from toolkit.models.families.base import Family

KEYS: Mapping[str, Key] = {
    **qwen2.KEYS,
    "head_dim": Key(SIZE, 128),
    "attention_bias": Key(FLAG, False),
}

QWEN3 = Family(
    "qwen3",
    KEYS,
    llama.model,
    llama.unsupported,
    query_key_norm=True,
    sliding=qwen2.upper_layers,
)
