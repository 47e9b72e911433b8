"""Model families: the interpretation of a Hugging Face config, for the planner and for
megatron-core.

A family with llama's layers is a row of `llama_like.py`; another has a file, listed here. Every
other causal language model of transformers is `generic`. A `config` here is a dict for which
`check_config` found no problem.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import PlanError
from toolkit.models.families.base import Attention, Family, MegatronModel, Settings
from toolkit.models.families.deepseek_experts import GLM4_MOE
from toolkit.models.families.deepseek_v3 import DEEPSEEK_V3
from toolkit.models.families.generic import generic, model_types
from toolkit.models.families.gpt2 import GPT2
from toolkit.models.families.gpt_neox import GPT_NEOX
from toolkit.models.families.gpt_oss import GPT_OSS
from toolkit.models.families.llama4_text import LLAMA4_TEXT
from toolkit.models.families.llama_like import LLAMA_LIKE
from toolkit.models.families.mixtures import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from toolkit.models.families.shape import shape
from toolkit.models.spec import ModelSpec

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        *LLAMA_LIKE, DEEPSEEK_V3, GLM4_MOE, GPT2, GPT_NEOX, GPT_OSS, LLAMA4_TEXT, MIXTRAL,
        QWEN2_MOE, QWEN3_MOE,
    )
}  # fmt: skip
"""Every `model_type` with a family file: supported by megatron-core, and planned without
torch."""

__all__ = [
    "FAMILIES", "MegatronModel", "attention", "family_of", "mapped", "megatron_model",
    "model_spec", "published", "settings_of", "unsupported",
]  # fmt: skip


def settings_of(config: Mapping[str, object]) -> Settings:
    """The config with its family's defaults; only its `model_type` must be valid."""
    return Settings(family_of(str(config["model_type"])), config)


def family_of(model_type: str) -> Family:
    """The family of a `model_type`: from its own file, or from transformers."""
    return FAMILIES.get(model_type) or generic(model_type)


def published(config: dict[str, Any]) -> dict[str, Any]:
    """A published config without the keys that transformers does not read, which many have:
    remains of other releases and tools."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES and model_type not in model_types():
        return config
    family = family_of(str(model_type))
    return {k: v for k, v in config.items() if k in family.keys or k in family.aliases}


def attention(config: Mapping[str, object]) -> Attention:
    """The fastest implementation that computes this model's attention exactly."""
    settings = settings_of(config)
    return settings.family.attention(settings)


def model_spec(config: Mapping[str, object]) -> ModelSpec:
    """The model's shape. Missing keys take transformers' defaults for the `model_type`."""
    return shape(settings_of(config))


def unsupported(config: Mapping[str, object]) -> str | None:
    """Why megatron-core cannot compute this config exactly; None when it can."""
    settings = settings_of(config)
    return settings.family.unsupported(shape(settings), settings)


def megatron_model(config: Mapping[str, object]) -> MegatronModel:
    """The config in megatron-core's terms. Raises PlanError if it is `unsupported`."""
    if (reason := unsupported(config)) is not None:
        raise PlanError(f"parallel.model: {reason}", fix="set parallel.model to hf")
    return mapped(config)


def mapped(config: Mapping[str, object]) -> MegatronModel:
    """The map of the model's tensors; its other fields are valid if nothing is
    `unsupported`."""
    settings = settings_of(config)
    family = settings.family
    model = family.model(shape(settings), settings)
    token = settings["pad_token_id"]
    if family.freezes_padding and token is not None:
        # torch counts a negative index from the end.
        return replace(model, padding_token=token % model.gpt["vocab_size"])
    return model
