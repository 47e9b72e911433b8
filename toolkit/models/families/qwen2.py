"""Qwen2: llama with biases on query, key and value; the upper layers may slide.

Qwen3 differs only in what the model's shape already says: norms over query and key heads
in place of the biases.
"""

from toolkit.models.config_check import Settings
from toolkit.models.families.base import (
    Family,
    MegatronModel,
    common_gpt,
    rotary,
    sliding_window,
)
from toolkit.models.families.llama import decoder_tensors, decoder_transformer, unsupported
from toolkit.models.spec import ModelSpec


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Qwen2 or qwen3 as a megatron-core GPTModel."""
    window = sliding_window(spec, _sliding_layers(spec, settings))
    return MegatronModel(
        decoder_transformer(spec, settings) | window,
        common_gpt(spec) | rotary(settings),
        decoder_tensors(spec),
    )


def _sliding_layers(spec: ModelSpec, settings: Settings) -> tuple[bool, ...]:
    """Which layers see only the window, where there is one."""
    if (types := settings["layer_types"]) is not None:
        return tuple(kind == "sliding_attention" for kind in types)
    return tuple(layer >= settings["max_window_layers"] for layer in range(spec.layers))


QWEN2 = Family("qwen2", model, unsupported)
