"""Matrix products in 8-bit floats: torchao's `Float8Linear` in the decoder layers of
transformers' models.

Weights do not change in memory, communication and checkpoints. Each product rounds its two
operands to 8 bits, with scales computed from them.
"""

from dataclasses import replace

import torch
from torch import nn

from toolkit.errors import PlanError
from toolkit.layout import Fp8Scaling
from toolkit.models.huggingface import decoder_layers
from toolkit.system.install import optional

_MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this: `torch._scaled_mm`'s rule."""


def convert(model: nn.Module, scaling: Fp8Scaling | None) -> None:
    """Convert the products of `model`'s decoder layers to 8 bits. None: nothing.

    Parameters keep names, shapes, dtypes and devices. Head and embeddings, and weights whose
    dimensions are not multiples of 16 are not converted. Raises PlanError if nothing can be
    converted, BackendUnavailable without torchao.
    """
    if scaling is None:
        return
    torchao = optional(
        "torchao.float8", "fp8", "kernels.fp8: torchao", ", or set kernels.fp8 to null"
    )
    config = torchao.Float8LinearConfig.from_recipe_name(scaling)
    config = replace(config, emulate=not torch.cuda.is_available())
    chosen = {
        part
        for layer in decoder_layers(model)
        for part in layer.modules()
        if type(part) is nn.Linear
        and part.in_features % _MULTIPLE == 0
        and part.out_features % _MULTIPLE == 0
    }
    if not chosen:
        raise PlanError(
            f"kernels.fp8: {type(model).__name__} has no product that can be in 8 bits",
            fix="set kernels.fp8 to null",
        )
    torchao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda part, _: part in chosen
    )
