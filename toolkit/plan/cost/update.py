"""The optimizer's step, and CPU and NVMe offload."""

from typing import NamedTuple

from toolkit.layout import Layout
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.operators import Device
from toolkit.plan.cost.owners import owner_s
from toolkit.plan.cost.stages import StageShare
from toolkit.plan.cost.traffic import PlacedLayout, exposed

UPDATE_BYTES = 50
"""Bytes that AdamW moves per parameter: gradient, weight and two moments in fp32 read, the
last three written (28), the 16-bit weight written (2), the gradient scaled (8), its norm (4),
its buffer copied and cleared (8)."""
STATE_BYTES = 12
"""fp32 weight and two moments, which NVMe offload reads and writes every step."""


def updated_parameters(layout: Layout, share: StageShare) -> float:
    """Parameters of `share` that one rank updates, where all of them train."""
    if layout.zero_stage == 0:
        return share.parameters
    copies = layout.dp * layout.cp // layout.replicate
    expert_copies = max(1.0, copies * layout.tp / layout.ep) if layout.ep > 1 else copies
    return (share.dense + share.vocabulary) / copies + share.experts / expert_copies


def optimizer_s(place: PlacedLayout, share: StageShare, device: Device) -> float:
    """Seconds of the optimizer's step, on the device or on the host."""
    parameters = updated_parameters(place.layout, share.trained)
    if place.layout.offload_optimizer == "none":
        update = UPDATE_BYTES * parameters / device.memory
        return update + owner_s(place, share.stage, device)
    cluster, efficiency = place.cluster, place.efficiency
    on_node = min(cluster.gpus_per_node, place.layout.world)
    memory = cluster.host_memory_bytes_per_s * efficiency["host.memory"] / on_node
    return place.workload.cost.cpu_update_bytes * parameters / memory


class OffloadCopies(NamedTuple):
    """Bytes that offload copies between a rank's device and its host, by what is copied."""

    forward: dict[str, float]
    """In the forward pass of every micro batch."""
    backward: dict[str, float]
    """In the backward pass of every micro batch."""
    last: dict[str, float]
    """In that of the last one, too."""
    updated: float
    """After the update."""


def host_copies(place: PlacedLayout, share: StageShare) -> OffloadCopies:
    """What offload copies.

    Weights are loaded for every pass: in 16 bits, while FSDP sends only its fp32 weights. A
    layer that is recomputed is loaded once in the backward pass, as ZeRO-3 keeps up to 1e9
    elements that are soon used again. Inputs of recomputed layers leave during the forward pass
    and return during the backward pass. Updated 16-bit weights return to where they compute.
    """
    layout, workload = place.layout, place.workload
    cost, width = workload.cost, workload.width
    held, shard = (updated_parameters(layout, one) for one in (share, share.trained))
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    last: dict[str, float] = {}
    updated = 0.0
    if layout.offload_parameters != "none":
        forward["weights"] = (FP32_BYTES if cost.sends_fp32_weights else width) * held
        backward["weights"] = forward["weights"]
    if layout.offload_optimizer != "none":
        sends_back = layout.offload_parameters == "none" and not cost.sends_fp32_weights
        updated = width * shard if sends_back else 0.0
        each, once = cost.gradient_copies(layout, width)
        backward["gradients"] = each * FP32_BYTES * shard
        last["gradients"] = once * FP32_BYTES * shard
    return OffloadCopies(forward, backward, last, updated)


def offload_parts_s(
    place: PlacedLayout,
    share: StageShare,
    optimizer_s: float,
    forward_s: float,
    backward_s: float,
) -> dict[str, float]:
    """Seconds per step that transfers to and from host and NVMe add, by what is sent.

    Copies run beside the passes, one after the other (ZeRO-Offload, arXiv:2101.06840): what a
    pass does not hide, or by how much they slow it down. NVMe reads and writes states during
    the update (ZeRO-Infinity, arXiv:2104.07857).
    """
    layout, efficiency = place.layout, place.efficiency
    places = {layout.offload_optimizer, layout.offload_parameters}
    if places == {"none"}:
        return {}
    host = place.cluster.host_link_bytes_per_s * efficiency["link.host"]
    on_node = min(place.cluster.gpus_per_node, layout.world)
    disk = place.cluster.nvme_bytes_per_s * efficiency["link.nvme"] / on_node
    rates = {"weights": disk if layout.offload_parameters == "nvme" else host}
    copies, slowed = host_copies(place, share), efficiency["overlap.host"]
    both = dict(copies.backward)
    for name, nbytes in copies.last.items():
        both[name] += nbytes
    steps = layout.gradient_accumulation
    added: dict[str, float] = {}
    for sent, beside_s, times in (
        (copies.forward, forward_s, steps),
        (copies.backward, backward_s, steps - 1),
        (both, backward_s, 1),
    ):
        seconds = {name: nbytes / rates.get(name, host) for name, nbytes in sent.items()}
        total = sum(seconds.values())
        waited = times * exposed(total, beside_s, slowed) / total if total else 0.0
        for name, one in seconds.items():
            added[name] = added.get(name, 0.0) + waited * one
    if layout.offload_optimizer != "none":
        added["updated"] = copies.updated / host
    if layout.offload_optimizer == "nvme":
        shard = updated_parameters(layout, share.trained)
        added["states"] = max(0.0, 2 * STATE_BYTES * shard / disk - optimizer_s)
    return added
