"""Model families: how each Hugging Face `model_type` is expressed in megatron-core.

One file per family; to add one, write it and list it here.
"""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_check import Settings
from toolkit.models.config_keys import FAMILIES as KEYS
from toolkit.models.families.base import Family, MegatronModel
from toolkit.models.families.gemma2 import GEMMA2
from toolkit.models.families.gpt2 import GPT2
from toolkit.models.families.gpt_neox import GPT_NEOX
from toolkit.models.families.llama import LLAMA
from toolkit.models.families.mistral import MISTRAL
from toolkit.models.families.mixtral import MIXTRAL
from toolkit.models.families.qwen2 import QWEN2
from toolkit.models.families.qwen3 import QWEN3
from toolkit.models.families.qwen3_moe import QWEN3_MOE
from toolkit.models.spec import ModelSpec

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        GEMMA2, GPT2, GPT_NEOX, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE
    )
}  # fmt: skip

__all__ = ["FAMILIES", "MegatronModel", "megatron_model", "unsupported"]


def unsupported(config: Mapping[str, object]) -> str | None:
    """Why megatron-core cannot compute this Hugging Face config exactly; None when it can.

    `config` is one for which `check_config` found no problem.
    """
    model_type = str(config["model_type"])
    if model_type not in FAMILIES:
        return f"DMT has no Megatron map for model_type {model_type}"
    settings = Settings(KEYS[model_type], config)
    return FAMILIES[model_type].unsupported(ModelSpec.from_config(config), settings)


def megatron_model(config: Mapping[str, object]) -> MegatronModel:
    """The Hugging Face config in megatron-core's words, where `unsupported` is None."""
    model_type = str(config["model_type"])
    settings = Settings(KEYS[model_type], config)
    describe = FAMILIES[model_type].model
    assert describe is not None, "refused by `unsupported`"
    model = describe(ModelSpec.from_config(config), settings)
    if FAMILIES[model_type].freezes_padding:
        return replace(model, padding_token=settings["pad_token_id"])
    return model
