"""Adapters of transformers models: PEFT's own layers."""

import logging
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from toolkit.adapters.lora import Lora

if TYPE_CHECKING:
    from peft import LoraConfig


def import_peft() -> Any:
    """PEFT, when it is needed: it imports bitsandbytes where that is installed, which takes
    seconds and complains that a kernel for 4 bits is missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import peft

    return peft


def inject(model: PreTrainedModel, lora: Lora | None) -> None:
    """Put PEFT's layers into `model`, their parameters where and of the type that the base's
    are, not yet filled; nothing without `lora`.

    `toolkit.models.huggingface.named_parameters` gives all parameters their checkpoint names.
    """
    if lora is not None:
        import_peft().inject_adapter_in_model(peft_config(lora), model)


def peft_config(lora: Lora, base: str | None = None) -> "LoraConfig":
    """The adapters in PEFT's words; `base` is the hub id or folder of their model."""
    section = lora.section
    config: LoraConfig = import_peft().LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=section.rank,
        # A whole number is written as one: some who read adapter_config.json want it so.
        lora_alpha=int(section.alpha) if section.alpha.is_integer() else section.alpha,
        lora_dropout=section.dropout,
        use_rslora=section.rslora,
        init_lora_weights="gaussian" if section.init == "gaussian" else True,
        target_modules=list(lora.short_targets),
        fan_in_fan_out=lora.transposed,
    )
    return config
