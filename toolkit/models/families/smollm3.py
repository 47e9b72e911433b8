"""SmolLM3: llama in which some layers do not turn by positions; those may slide."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_keys import (
    COUNT,
    FLAG,
    LAYER_TYPES,
    SIZE,
    SWITCHES,
    TOKEN,
    TOKENS,
    Key,
)
from toolkit.models.families import common, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **llama.KEYS,
    "vocab_size": Key(SIZE, 128256),
    "hidden_size": Key(SIZE, 2048),
    "num_hidden_layers": Key(SIZE, 36),
    "num_attention_heads": Key(SIZE, 16),
    "num_key_value_heads": Key(SIZE, 4, nullable=True),
    "head_dim": Key(SIZE),
    "max_position_embeddings": Key(SIZE, 32768),
    "pad_token_id": Key(TOKEN, 128004, nullable=True),
    "bos_token_id": Key(TOKEN, 128000, nullable=True),
    "eos_token_id": Key(TOKENS, 128001, nullable=True),
    "use_sliding_window": Key(FLAG, False),
    "sliding_window": Key(SIZE, nullable=True),
    "max_window_layers": Key(COUNT),  # in published configs; transformers reads it nowhere
    "no_rope_layers": Key(SWITCHES, nullable=True),
    "no_rope_layer_interval": Key(SIZE, 4),
    "layer_types": Key(LAYER_TYPES, nullable=True),
    "tie_word_embeddings": Key(FLAG, True),
}


def layers_without_rotary(settings: Settings) -> list[int]:
    """Layers that the list marks with 0; without a list, the last of every interval."""
    layers, stated = range(settings["num_hidden_layers"]), settings["no_rope_layers"]
    if stated is not None:
        return [layer for layer in layers if not stated[layer]]
    return [layer for layer in layers if (layer + 1) % settings["no_rope_layer_interval"] == 0]


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """SmolLM3 as a megatron-core GPTModel."""
    plain = llama.model(spec, settings)
    unturned = layers_without_rotary(settings)
    pattern = [int(layer in unturned) for layer in range(spec.layers)]
    gpt = {**plain.gpt, **common.rotary(settings, theta=2e6)}
    return replace(plain, transformer={**plain.transformer, "no_rope_freq": pattern}, gpt=gpt)


SMOLLM3 = Family("smollm3", KEYS, model, llama.unsupported, sliding=layers_without_rotary)
