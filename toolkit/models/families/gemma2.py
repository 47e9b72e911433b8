"""Gemma 2, which megatron-core cannot express: refused with the reason."""

from toolkit.models.config_check import Settings
from toolkit.models.families.base import Family
from toolkit.models.spec import ModelSpec


def unsupported(spec: ModelSpec, settings: Settings) -> str:
    """Why megatron-core cannot compute any gemma2."""
    del spec, settings
    return (
        "megatron-core's layer has no norms after attention and MLP and no soft-capping of "
        "attention scores and logits, which gemma2 needs"
    )


GEMMA2 = Family("gemma2", None, unsupported)
