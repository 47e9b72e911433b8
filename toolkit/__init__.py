"""DMT, the DeepSpeed/Megatron toolkit: one recipe, any layout, the same loss."""

import importlib
import logging

__version__ = "0.1.0"
_HOMES = {
    "DmtError": "toolkit.errors",
    "LaunchResult": "toolkit.launchers.launching",
    "Planned": "toolkit.plan.planned",
    "Recipe": "toolkit.recipe.schema",
    "RehearsalResult": "toolkit.rehearse.rehearsal",
    "launch_recipe": "toolkit.launchers.launching",
    "load_recipe": "toolkit.intake.load",
    "plan_recipe": "toolkit.plan.planned",
    "rehearse_recipe": "toolkit.rehearse.rehearsal",
}
"""Homes of the Python API, imported when used. Its types are in __init__.pyi."""
__all__ = [*_HOMES]

# Before transformers, PEFT or DeepSpeed import them: their complaints are of kernels that they
# cannot load, none of which is used, and of how torchao registers its types with torch.
for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
