"""The optimizer's step, and CPU and NVMe offload."""

from toolkit.layout import Layout
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.operators import Device
from toolkit.plan.cost.owners import owner_s
from toolkit.plan.cost.stages import StageShare, recomputed_of_stages
from toolkit.plan.cost.traffic import PlacedLayout, reduce_bytes

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


def offload_parts_s(
    place: PlacedLayout,
    share: StageShare,
    optimizer_s: float,
    forward_s: float,
    backward_s: float,
) -> dict[str, float]:
    """Seconds per step that transfers to and from host and NVMe add, by what is sent.

    Gradients are sent during the backward passes and weights return after the update
    (ZeRO-Offload, arXiv:2101.06840); NVMe reads and writes states during the update
    (ZeRO-Infinity, arXiv:2104.07857). Offloaded weights are loaded for every pass: in 16 bits,
    while FSDP sends only its fp32 weights. Inputs of recomputed layers leave during the forward
    pass and return during the backward pass.
    """
    layout, efficiency = place.layout, place.efficiency
    host = place.cluster.host_link_bytes_per_s * efficiency["link.host"]
    on_node = min(place.cluster.gpus_per_node, layout.world)
    disk = place.cluster.nvme_bytes_per_s * efficiency["link.nvme"] / on_node
    held, shard = (updated_parameters(layout, one) for one in (share, share.trained))
    steps = layout.gradient_accumulation
    fp32_weights = place.workload.cost.sends_fp32_weights
    added: dict[str, float] = {}
    if layout.offload_optimizer != "none":
        times = steps if layout.zero_stage >= 2 else 1
        leave = reduce_bytes(place.workload) * shard / host
        added["gradients"] = times * max(0.0, leave - backward_s)
        added["updated"] = 0.0 if fp32_weights else place.workload.width * shard / host
    if layout.offload_optimizer == "nvme":
        added["states"] = max(0.0, 2 * STATE_BYTES * shard / disk - optimizer_s)
    if layout.offload_parameters != "none":
        width = FP32_BYTES if fp32_weights else place.workload.width
        read = width * held / (disk if layout.offload_parameters == "nvme" else host)
        passes = max(0.0, read - forward_s) + max(0.0, read - backward_s)
        added["weights"] = steps * passes
    if layout.offload_activations:
        spec = place.workload.spec
        ways = layout.recompute, spec.layers, *layout.division
        layers = recomputed_of_stages(*ways)[share.stage]
        sent = place.workload.width * place.slice.stream * spec.hidden * layers / host
        passes = max(0.0, sent - forward_s) + max(0.0, sent - backward_s)
        added["inputs"] = steps * passes
    return added
