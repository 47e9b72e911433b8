"""Mistral: llama in which every layer may see a sliding window only."""

from collections.abc import Mapping

from toolkit.models.config_keys import SIZE, Key, without
from toolkit.models.families import llama
from toolkit.models.families.base import Family

KEYS: Mapping[str, Key] = {
    **without(llama.KEYS, "pretraining_tp", "attention_bias", "mlp_bias"),
    "intermediate_size": Key(SIZE, 14336),
    "num_key_value_heads": Key(SIZE, 8),
    "max_position_embeddings": Key(SIZE, 131072),
    "sliding_window": Key(SIZE, 4096, nullable=True),
}

MISTRAL = Family("mistral", KEYS, llama.model, llama.unsupported)
