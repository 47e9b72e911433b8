"""DeepSpeed's AdamW with states in bf16, on the device or offloaded."""

from toolkit.features.base import Feature
from toolkit.recipe.section import Section


class Bf16StateKeys(Section):
    """What DeepSpeed keeps of AdamW, and where: additions to `parallel.zero`."""

    bf16_optimizer_states: bool | None = None
    """Engine deepspeed with `training.precision: bf16`: AdamW's moments and the weights that it
    updates are kept in bf16: 6 bytes per parameter instead of 12, and smaller updates are lost.
    In stages 2 and 3, and in 1 with offload. null: the value in `config`, otherwise false."""


_RULES = "toolkit.features.bf16_states.rules"

FEATURE = Feature(
    name="bf16_states",
    section=Bf16StateKeys,
    inside="parallel.zero",
    intent=f"{_RULES}:intent",
    refuse=f"{_RULES}:refusals",
    cost=f"{_RULES}:workload",
    ledger=f"{_RULES}:ledger",
    rehearse=f"{_RULES}:rehearsed",
    deepspeed={
        "bf16.bf16_master_weights_and_grads": ("bf16_optimizer_states", False),
        "bf16.bf16_optimizer_states": ("bf16_optimizer_states", False),
    },
)
