"""Liger's kernels in transformers' models: RMSNorm, gated activation functions and rotary
positions, each as one Triton kernel per direction."""

import logging
import os
import sys
from inspect import signature
from typing import Any

from transformers import PreTrainedModel

from toolkit.errors import BackendUnavailable
from toolkit.layout import FusedKernels
from toolkit.system.compilers import private_folder
from toolkit.system.install import install


def fuse(model: PreTrainedModel, kernels: FusedKernels) -> None:
    """Let `model`'s modules compute with Liger's kernels; does nothing unless `kernels` is
    `liger`.

    Liger knows for each family which norms scale by 1 + weight, and which gradients a kernel
    may overwrite. Loss and experts stay transformers'. Parameters and hooks do not change. The
    rotary function of the family is replaced for the whole process; classes are not, so that
    later models have the parameters of their configs. Raises BackendUnavailable without Liger.
    """
    if kernels != "liger":
        return
    apply = _patches()[model.config.model_type]
    # Of implementations for other accelerators, which cannot be imported.
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    os.environ.setdefault("TRITON_CACHE_DIR", str(private_folder("triton")))
    experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    wanted: dict[str, Any] = {"model": model, "swiglu": not experts}
    wanted |= dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy"), False)
    family = sys.modules[type(model).__module__]
    classes = {name: one for name, one in vars(family).items() if isinstance(one, type)}
    apply(**{key: wanted[key] for key in wanted.keys() & signature(apply).parameters})
    vars(family).update(classes)


def _patches() -> Any:
    """Liger's function for each model type."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise BackendUnavailable(
            f"kernels.fused: liger-kernel cannot be imported ({error})",
            fix=f"{install('liger')}, or set it to none",
        ) from error
    return MODEL_TYPE_TO_APPLY_LIGER_FN
