"""Liger's kernels in transformers' models: RMSNorm, gated activation functions and rotary
positions, each as one Triton kernel per direction, and the loss with its linear layer."""

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from toolkit.batch import IGNORE_INDEX
from toolkit.errors import BackendUnavailable
from toolkit.layout import FusedKernels
from toolkit.system.compilers import private_folder
from toolkit.system.install import install, optional


def fuse(model: PreTrainedModel, kernels: FusedKernels) -> None:
    """Let `model`'s modules compute with Liger's kernels. Does nothing unless `kernels` is
    `liger`.

    Liger knows for each family which norms scale by 1 + weight, and which gradients a kernel
    may overwrite. Loss and experts stay transformers'. Parameters and hooks do not change. The
    rotary function of the family is replaced for the whole process. Classes are not, so that
    later models have the parameters of their configs. Raises BackendUnavailable without Liger.
    """
    if kernels != "liger":
        return
    patches = _liger("transformers.monkey_patch", "kernels.fused", "none")
    apply = patches.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
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


def fused_loss(model: PreTrainedModel) -> Callable[..., Any]:
    """A forward pass of `model` that returns log-probabilities if it is called with `targets`.

    Liger's function takes the place of the last linear layer, inside its module, so that
    engines gather its weight as usual. Raises BackendUnavailable without Liger, or with a
    version in which all tokens have the same weight.
    """
    ops = _liger("ops.fused_linear_cross_entropy", "kernels.loss", "whole")
    if "token_grad_output" not in signature(ops.fused_linear_cross_entropy_forward).parameters:
        raise BackendUnavailable(
            "kernels.loss: liger-kernel is older than 0.8.5",
            fix=f"{install('liger')}, or set it to whole",
        )
    made = _liger("transformers", "kernels.loss", "whole").LigerFusedLinearCrossEntropyLoss
    os.environ.setdefault("TRITON_CACHE_DIR", str(private_folder("triton")))
    plain, head = model.forward, model.get_output_embeddings()
    kernel = made(ignore_index=IGNORE_INDEX, reduction="none")

    def forward(targets: Tensor | None = None, **inputs: Any) -> Any:
        if targets is None:
            return plain(**inputs)
        own = head.forward
        head.forward = partial(_log_probs, kernel, head, targets)
        try:
            return plain(**inputs).logits
        finally:
            head.forward = own

    return forward


def _log_probs(
    kernel: Callable[..., Any], head: Any, targets: Tensor, hidden: Tensor
) -> Tensor:
    """log p(label) in fp32 [rows, sequence]."""
    rows = hidden.flatten(0, 1)
    losses: Tensor = kernel(head.weight, rows, targets.flatten(), head.bias)
    return -losses.view_as(targets)


def _liger(module: str, setting: str, other: str) -> Any:
    """A module of Liger's, for a setting that may have the value `other` instead."""
    what, otherwise = f"{setting}: liger-kernel", f", or set it to {other}"
    return optional(f"liger_kernel.{module}", "liger", what, otherwise)
