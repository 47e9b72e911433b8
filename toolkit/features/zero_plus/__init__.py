"""ZeRO++ (arXiv:2306.10209): a second copy of the weights within groups of ranks, and quantized
messages, by DeepSpeed in stage 3."""

from toolkit.features.base import Feature
from toolkit.recipe.section import Degree, Section


class ZeroPlusKeys(Section):
    """What ZeRO++ adds to `parallel.zero`."""

    hpz: Degree | None = None
    """Engine deepspeed, stage 3 (ZeRO++): number of ranks, usually those of a node, over which
    a second copy of the weights is sharded in the first forward pass of a step; later passes
    gather from this copy. null: the value in `config`, otherwise 1, no second copy."""
    quantized_weights: bool | None = None
    """Engine deepspeed, stage 3, on GPUs (ZeRO++): weights are quantised to 8 bits when they
    are gathered. null: the value in `config`, otherwise false."""
    quantized_gradients: bool | None = None
    """The same for gradients, in 4 bits between nodes; with `training.precision: fp16` only."""

    @property
    def on(self) -> list[str]:
        """The keys that change something."""
        values = {name: getattr(self, name) for name in ZeroPlusKeys.model_fields}
        return [name for name, value in values.items() if value is True or (value or 1) > 1]


_RULES = "toolkit.features.zero_plus.rules"

FEATURE = Feature(
    name="zero_plus",
    section=ZeroPlusKeys,
    inside="parallel.zero",
    intent=f"{_RULES}:intent",
    refuse=f"{_RULES}:refusals",
    cost=f"{_RULES}:workload",
    ledger=f"{_RULES}:ledger",
    deepspeed={
        "zero_optimization.zero_hpz_partition_size": ("hpz", 1),
        "zero_optimization.zero_quantized_weights": ("quantized_weights", False),
        "zero_optimization.zero_quantized_gradients": ("quantized_gradients", False),
    },
    degrees=("hpz",),
    presets=("zeropp",),
)
