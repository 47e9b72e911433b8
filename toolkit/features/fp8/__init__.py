"""Matrix products in 8-bit floats (docs/fp8.md)."""

from typing import Literal

from toolkit.features.base import Feature
from toolkit.recipe.section import Count, Section


class LayersInBf16(Section):
    """Decoder layers at the ends of the model."""

    first: Count = 0
    """Number of layers at the beginning."""
    last: Count = 0
    """Number of layers at the end."""


class Fp8Section(Section):
    """Matrix products of the decoder layers in 8-bit floats, on transformers' dense models
    (docs/fp8.md)."""

    recipe: Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"] = "rowwise"
    """torchao's scaling. `rowwise`: one power-of-two scale for each row of an operand;
    `rowwise_with_gw_hp`: the same, but gradients of weights stay in 16 bits; `tensorwise`: one
    scale per operand, which depends on micro batch and layout."""
    layers_in_bf16: LayersInBf16 = LayersInBf16()
    """Layers that stay in 16 bits."""

    def __str__(self) -> str:
        return self.recipe

    def converted(self, layers: int) -> int:
        """How many of the model's layers are in 8 bits."""
        return layers - self.layers_in_bf16.first - self.layers_in_bf16.last


_ADVICE = "write bf16, and `fp8: {recipe: rowwise}` beside `training`"
_RULES = "toolkit.features.fp8.rules"

FEATURE = Feature(
    name="fp8",
    section=Fp8Section,
    check=f"{_RULES}:problems",
    reads=("cluster.gpu", "training.precision", "training.sequence_length"),
    refuse=f"{_RULES}:refusals",
    cost=f"{_RULES}:workload",
    ledger=f"{_RULES}:ledger",
    apply="toolkit.features.fp8.products:convert",
    rehearse=f"{_RULES}:rehearsed",
    bounds=(1e-3, 5e-2),
    packages={"torchao": "torchao"},
    excludes=frozenset(("adapter", "liger", "scripts")),
    foreign={"fp8.recipe": "float8 fp8_recipe float8_recipe_name enable_fp8"},
    foreign_values={"training.precision": {"fp8": _ADVICE, "float8": _ADVICE}},
)
