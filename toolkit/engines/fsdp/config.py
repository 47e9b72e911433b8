"""From a layout to `fsdp.json`: torch's FSDP2 in the words of its own keyword arguments."""

from typing import Any

from toolkit.layout import DTYPES, Layout


def render(layout: Layout, precision: str) -> dict[str, Any]:
    """What `FsdpEngine` reads: how many groups of ranks have all shards, and the arguments of
    `fully_shard` for every decoder layer.

    Stage 3 drops a layer's gathered weights after its forward pass. Stages 1 and 2 keep them
    for the step. Stage 1 also keeps whole gradients, summed over micro batches, and reduces
    them once a step. The weights that are updated are sharded and fp32 in all stages, and
    gradients are reduced in fp32. `param_dtype` is what is gathered and computed in.
    """
    offloads = layout.offload_parameters == "cpu"
    return {
        "replicate": layout.replicate,
        "reduce_every_micro_batch": layout.zero_stage > 1,
        "reshard_after_forward": layout.zero_stage == 3,
        "mp_policy": {"param_dtype": DTYPES[precision], "reduce_dtype": "float32"},
        "offload_policy": {"pin_memory": True} if offloads else None,
    }
