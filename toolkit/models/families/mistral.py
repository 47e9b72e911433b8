"""Mistral: llama in which every layer may see a sliding window only."""

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
    """Mistral as a megatron-core GPTModel."""
    window = sliding_window(spec, (True,) * spec.layers)
    return MegatronModel(
        decoder_transformer(spec, settings) | window,
        common_gpt(spec) | rotary(settings),
        decoder_tensors(spec),
    )


MISTRAL = Family("mistral", model, unsupported)
