"""Adapters of transformers models: PEFT's own layers."""

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from toolkit.adapters.lora import Lora

if TYPE_CHECKING:
    from peft import LoraConfig


def inject(model: PreTrainedModel, lora: Lora | None) -> None:
    """Put PEFT's layers into `model`, their parameters where and of the type that the base's
    are, not yet filled; nothing without `lora`.

    `toolkit.models.huggingface.named_parameters` gives all parameters their checkpoint names.
    """
    if lora is not None:
        import peft  # takes seconds

        peft.inject_adapter_in_model(peft_config(lora), model)


def peft_config(lora: Lora, base: str | None = None) -> "LoraConfig":
    """The adapters in PEFT's words; `base` is the hub id or folder of their model."""
    from peft import LoraConfig

    section = lora.section
    return LoraConfig(
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
