"""Matrix products in 8-bit floats: torchao's `Float8Linear` in the decoder layers of
transformers' models.

Weights do not change in memory, communication and checkpoints; each product rounds its two
operands to 8 bits, with scales computed from them.
"""

from dataclasses import replace

import torch
from torch import nn

from toolkit.errors import PlanError
from toolkit.features.fp8 import Fp8Section
from toolkit.models.huggingface import decoder_layers
from toolkit.system.install import optional

_MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this: `torch._scaled_mm`'s rule."""


def convert(model: nn.Module, fp8: Fp8Section) -> None:
    """Convert the products of `model`'s decoder layers to 8 bits.

    Parameters keep names, shapes, dtypes and devices. Head and embeddings, the layers of
    `layers_in_bf16`, and weights whose dimensions are not multiples of 16 are not converted.
    Raises PlanError if nothing can be converted, BackendUnavailable without torchao.
    """
    torchao = optional("torchao.float8", "fp8", "fp8: torchao", ", or remove fp8")
    config = torchao.Float8LinearConfig.from_recipe_name(fp8.recipe)
    config = replace(config, emulate=not torch.cuda.is_available())
    layers = decoder_layers(model)
    kept = fp8.layers_in_bf16
    chosen = {
        part
        for layer in layers[kept.first : len(layers) - kept.last]
        for part in _products(layer)
    }
    if not chosen:
        raise PlanError(
            f"fp8: {type(model).__name__} has no product that can be computed in 8 bits",
            fix="remove fp8",
        )
    torchao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda part, _: part in chosen
    )


def _products(layer: nn.Module) -> list[nn.Linear]:
    return [
        part
        for part in layer.modules()
        if type(part) is nn.Linear
        and part.in_features % _MULTIPLE == 0
        and part.out_features % _MULTIPLE == 0
    ]
