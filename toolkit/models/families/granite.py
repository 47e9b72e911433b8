"""Granite: llama with factors on embeddings, attention scores, residual branches and logits."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_keys import POSITIVE, SIZE, Key
from toolkit.models.families import llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **llama.KEYS,
    "head_dim": Key(SIZE),
    "embedding_multiplier": Key(POSITIVE, 1.0),
    "attention_multiplier": Key(POSITIVE, 1.0),
    "residual_multiplier": Key(POSITIVE, 1.0),
    "logits_scaling": Key(POSITIVE, 1.0),
}


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Granite as a megatron-core GPTModel, scaled by functions of ours."""
    plain = llama.model(spec, settings)
    scores = {"softmax_scale": settings["attention_multiplier"]}
    return replace(
        plain,
        transformer={**plain.transformer, **scores},
        embedding_scale=settings["embedding_multiplier"],
        residual_scale=settings["residual_multiplier"],
        logits_divisor=settings["logits_scaling"],
    )


GRANITE = Family("granite", KEYS, model, llama.unsupported)
