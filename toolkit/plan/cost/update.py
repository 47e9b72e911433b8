"""The symbols of the optimizer's step, and of CPU and NVMe offload."""

from toolkit.layout import Layout
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.operators import Device
from toolkit.plan.cost.stages import StageShare
from toolkit.plan.cost.traffic import PlacedLayout

UPDATE_BYTES = 50
"""Bytes that AdamW moves per parameter: gradient, weight and two moments in fp32 read, the
last three written (28), the 16-bit weight written (2), the gradient scaled (8), its norm (4),
its buffer copied and cleared (8)."""
STATE_BYTES = 12
"""fp32 weight and two moments, which NVMe offload reads and writes every step."""


def _updated(layout: Layout, share: StageShare) -> float:
    """Parameters of `share` that one rank updates, where all of them train."""
    if layout.zero_stage == 0:
        return share.parameters
    copies = layout.dp * layout.cp // layout.replicate
    expert_copies = max(1.0, copies * layout.tp / layout.ep) if layout.ep > 1 else copies
    return (share.dense + share.vocabulary) / copies + share.experts / expert_copies


def update_symbols(place: PlacedLayout, share: StageShare, device: Device) -> dict[str, float]:
    """The optimizer's step, on the device or on the host; each is timed as AdamW's."""
    cluster, away = place.cluster, place.layout.offload_optimizer != "none"
    host = cluster.host_memory_bytes_per_s * place.efficiency["host.memory"]
    return {
        "update_bytes": place.workload.cost.cpu_update_bytes if away else UPDATE_BYTES,
        "updated": _updated(place.layout, share.trained),
        "update_bytes_per_s": host / _on_node(place) if away else device.memory,
    }


def _on_node(place: PlacedLayout) -> int:
    return min(place.cluster.gpus_per_node, place.layout.world)


def host_copies(place: PlacedLayout, share: StageShare) -> dict[str, float]:
    """What offload copies between a rank's device, its host and disks, in bytes, and how fast.

    Weights are loaded for every pass: in 16 bits, while FSDP sends only its fp32 weights. A
    layer that is recomputed is loaded once in the backward pass, as ZeRO-3 keeps up to 1e9
    elements that are soon used again. Gradients leave in each backward pass, or the last one.
    Updated 16-bit weights return to where they compute. NVMe reads and writes states during the
    update.
    """
    layout, workload, efficiency = place.layout, place.workload, place.efficiency
    cost, width = workload.cost, workload.width
    held, shard = (_updated(layout, one) for one in (share, share.trained))
    away, on_disk = layout.offload_optimizer != "none", layout.offload_optimizer == "nvme"
    loads, stays = layout.offload_parameters != "none", not cost.sends_fp32_weights
    each, once = cost.gradient_copies(layout, width) if away else (0, 0)
    host = place.cluster.host_link_bytes_per_s * efficiency["link.host"]
    disk = place.cluster.nvme_bytes_per_s * efficiency["link.nvme"] / _on_node(place)
    return {
        "loaded_bytes": loads * (width if stays else FP32_BYTES) * held,
        "sums_bytes": each * FP32_BYTES * shard,
        "last_sums_bytes": once * FP32_BYTES * shard,
        "returned_bytes": width * shard if away and stays and not loads else 0.0,
        "states_bytes": 2 * STATE_BYTES * shard if on_disk else 0.0,
        "loading_bytes_per_s": disk if layout.offload_parameters == "nvme" else host,
        "host_bytes_per_s": host,
        "disk_bytes_per_s": disk,
        "host_slows": efficiency["overlap.host"],
    }
