"""Adapters of transformers models: PEFT's own layers."""

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from toolkit.errors import PlanError
from toolkit.models.adapters.lora import Lora

if TYPE_CHECKING:
    from peft import LoraConfig


def inject(model: PreTrainedModel, lora: Lora | None) -> None:
    """Add PEFT's layers to `model`, with parameters on the device and in the dtype of the
    base's, uninitialised. Does nothing without `lora`. Raises PlanError for projections that
    PEFT refuses in this model.

    `toolkit.models.huggingface.named_parameters` gives all parameters their checkpoint names.
    """
    if lora is not None:
        import peft  # takes seconds

        try:
            peft.inject_adapter_in_model(peft_config(lora), model)
        except ValueError as error:
            told = f"adapter.targets: PEFT does not adapt {lora.section.targets} here: {error}"
            raise PlanError(told, fix="list projections, e.g. [q_proj, v_proj]") from error


def peft_config(lora: Lora, base: str | None = None) -> "LoraConfig":
    """The adapters as PEFT's config. `base` is the hub id or folder of their model."""
    from peft import LoraConfig

    section = lora.section
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=section.rank,
        # Integers are written without a decimal point: some readers of adapter_config.json need
        # it.
        lora_alpha=int(section.alpha) if section.alpha.is_integer() else section.alpha,
        lora_dropout=section.dropout,
        target_modules=list(lora.short_targets),
        target_parameters=list(lora.parameter_targets) or None,
        fan_in_fan_out=lora.transposed,
    )
