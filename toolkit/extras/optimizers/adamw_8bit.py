"""AdamW with 8-bit moments, computed by bitsandbytes."""

from math import prod

from toolkit.optimizers.base import (
    MOMENTS,
    OptimizerKind,
    Quantity,
    Shape,
    WholeTensors,
    is_embedding,
)

MIN_SIZE = 4096
"""Elements of the smallest tensor with 8-bit moments, by bitsandbytes' default."""
BLOCK = 256
"""Elements that share a scale in bitsandbytes."""


def _scales(shape: Shape) -> Shape:
    """The shape of the scales: one for each block of the flattened tensor, the last one's
    too."""
    return (-(-prod(shape) // BLOCK),)


_CODED = {
    "exp_avg_code": Quantity("uint8"),
    "exp_avg_sq_code": Quantity("uint8"),
    "exp_avg_scale": Quantity(shape=_scales),
    "exp_avg_sq_scale": Quantity(shape=_scales),
}

ADAMW_8BIT = OptimizerKind(
    title="8-bit AdamW",
    whole=WholeTensors(
        "toolkit.extras.optimizers.adamw_8bit_update:AdamW8bit",
        lambda tensor, _dimensions: not is_embedding(tensor),
        quantities=_CODED,
        owned=lambda shape: MOMENTS if prod(shape) < MIN_SIZE else tuple(_CODED),
    ),
    reference="toolkit.extras.optimizers.adamw_8bit_update:reference",
    approximated=(
        "8-bit states",
        "moments are rounded to 8 bits in every step, in blocks of whole tensors of the "
        "checkpoint; another last digit of a gradient may flip a code",
    ),
    aliases=("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
    packages=("bitsandbytes",),
    no_adapter="the states of so few parameters are small, there is nothing to save",
    gives_up="AdamW's fp32 moments",
)
"""`optimizer.name: adamw_8bit`."""
