"""The symbols of a step's communication, update and offload: how much is sent, at which rate,
and beside what."""

from functools import lru_cache
from typing import NamedTuple

from toolkit.layout import Layout
from toolkit.plan.cost.efficiency import Efficiency
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.layer import context_split, tokens_of
from toolkit.plan.cost.stages import StageShare
from toolkit.plan.cost.workload import Setup
from toolkit.plan.hardware.catalogue import Link
from toolkit.plan.hardware.cluster import Cluster

UPDATE_BYTES = 50
"""Bytes that AdamW moves per parameter: gradient, weight and two moments in fp32 read, the
last three written (28), the 16-bit weight written (2), the gradient scaled (8), its norm (4),
its buffer copied and cleared (8)."""
CPU_UPDATE_BYTES = 32
"""Bytes that AdamW moves on the host per parameter, norm and scale in one kernel: gradient,
weight and two moments in fp32 read, the last three written (28), the 16-bit weight (4)."""
STATE_BYTES = 12
"""fp32 weight and two moments, which NVMe offload reads and writes every step."""


# Links


class Links(NamedTuple):
    """Bytes per second that large collectives reach on a cluster's links, one member each way.

    Ranks are placed as `Layout.data_rank` says: tensor fastest, then context, data, pipeline.
    A group is `size` ranks that are `stride` apart. Latencies are not counted.
    """

    island: int
    """Ranks that reach each other without the network between nodes."""
    near: float
    """Within an island."""
    far: float
    """Between islands."""

    def islands(self, size: int, stride: int) -> int:
        """Over how many a group spreads."""
        return -(-size // max(1, min(size, self.island // stride)))

    def ring(self, size: int, stride: int) -> float:
        """Between neighbours of a ring. Over several islands it uses all members' adapters at
        once: NCCL builds as many rings as there are adapters, each with another member at the
        border."""
        islands = self.islands(size, stride)
        if islands == 1:
            return self.near
        rate = size / islands * self.far
        return min(rate, self.near) if size > islands else rate

    def exchange(self, size: int, stride: int) -> float:
        """Bandwidth of a member that sends all others an equal part, at the slower of both
        links."""
        if size == 1:
            return self.near
        apart = 1 / self.islands(size, stride)
        near, far = apart - 1 / size, 1 - apart
        return (near + far) / max(near / self.near, far / self.far)

    def message(self, stride: int) -> float:
        """Bandwidth of a message to the rank at distance `stride`."""
        return self.near if stride < self.island else self.far


@lru_cache(maxsize=64)
def links(cluster: Cluster, efficiency: Efficiency) -> Links:
    """The links of `cluster` at the rates of the table."""

    def rate(link: Link) -> float:
        return link.measured_bytes_per_s or link.bytes_per_s * efficiency[f"link.{link.kind}"]

    return Links(cluster.island, rate(cluster.node_link), rate(cluster.network))


# Within a layer


def layer_traffic(setup: Setup) -> dict[str, float]:
    """Collectives inside a layer. `back` and `again`: how much more is waited for in the
    backward pass, and by a layer that is recomputed."""
    workload, layout, found = setup.workload, setup.layout, links(*setup[2:])
    spec, width, tokens = workload.spec, workload.width, tokens_of(workload, layout)
    products = workload.cost.selective == "products"
    selective, full = layout.recompute == "selective", layout.recompute == "full"
    # The collectives of column-parallel products overlap with the gradients of their weights:
    # all of the backward pass without sequence parallel, half of it with it.
    slowed = setup.efficiency["overlap.megatron"]
    rate = found.ring if layout.exchange == "all_gather" else found.exchange
    # Tokens are sent to their experts and back; the mean over layers.
    sent = tokens * spec.experts_per_token / layout.tp * spec.hidden * (1 - 1 / layout.ep)
    apart = layout.tp if layout.cp * layout.dp >= layout.ep else 1
    return {
        "tensor": layout.tp,
        "tensor_bytes": width * tokens * spec.hidden,
        "tensor_bytes_per_s": found.ring(layout.tp, 1),
        "tensor_back": 0.5 + 0.5 * slowed if layout.sequence_parallel else slowed,
        # Every second product: gathers are repeated, sums are kept.
        "tensor_again": 1.0 if full else 0.5 * (selective and products),
        # Keys and values, or heads, have to arrive before attention; their gradients go back.
        "context_bytes": width * context_split(workload, layout).received,
        "context_bytes_per_s": rate(layout.cp, layout.tp),
        "context_again": full or (selective and not products),
        "expert_bytes": 2 * width * sent * spec.moe_layers / spec.layers,
        "expert_bytes_per_s": found.exchange(layout.ep, apart),
        "expert_again": full,
    }


# Within a step


def pipeline_traffic(setup: Setup) -> dict[str, float]:
    """An activation, or its gradient, to the neighbour stage. Tensor-parallel ranks send a part
    each (Narayanan et al. 2021, arXiv:2104.04473, section 4.1). The interleaved schedule sends
    them beside the next chunk's computation, but while the pipeline is filled and drained."""
    workload, layout = setup.workload, setup.layout
    size = workload.width * tokens_of(workload, layout) * workload.spec.hidden / layout.tp
    return {
        "stages": layout.pp,
        "pipeline_waited": setup.efficiency["overlap.megatron"] if layout.vpp > 1 else 1.0,
        "pipeline_bytes": size if layout.pp > 1 else 0.0,
        "pipeline_bytes_per_s": links(*setup[2:]).message(layout.world // layout.pp),
    }


def data_traffic(
    setup: Setup, share: StageShare, forward_s: float, backward_s: float
) -> dict[str, float]:
    """Gathering weights and reducing gradients, beside the passes of one micro batch.

    ZeRO-3 and FSDP gather a layer's weights for each pass of every micro batch, one layer
    ahead, and reduce its gradients. Otherwise gradients are reduced once per step beside the
    last backward pass, in stage 2, where they are never whole, every time. With a sharded
    optimizer, weights are then gathered beside the first forward pass (DeepSpeed: before it).
    Replicas of the shards sum their gradients once per step.
    """
    layout, workload, zero = setup.layout, setup.workload, setup.layout.zero_stage
    found = links(*setup[2:])
    ranks, steps = layout.dp * layout.cp, layout.gradient_accumulation
    several, shards = ranks > 1, ranks // layout.replicate
    slowed = setup.efficiency[workload.cost.overlap]
    sharded, beside = zero == 3, zero == 3 or workload.reduce_overlap
    ahead = zero == 3 or (beside and workload.cost.gathers_beside_forward)
    held = share.parameters if sharded else share.trained.parameters
    gathered = workload.width * held if zero else 0.0
    wire = FP32_BYTES if workload.reduce_bytes is None else workload.reduce_bytes
    reduced = wire * share.trained.parameters
    return {
        "data": shards,
        "data_bytes_per_s": found.ring(shards, layout.tp),
        "gathers": several * (steps if sharded else 1),
        "gathered_bytes": gathered,
        "beside_forward_s": ahead * forward_s,
        "gather_slows": ahead * slowed,
        "reductions": several * (steps if zero >= 2 else 1),
        "gathered_again_bytes": gathered if sharded else 0.0,
        "reduced_bytes": reduced * (1 if zero else 2),  # as much back in an all-reduce
        "beside_backward_s": beside * backward_s,
        "reduce_slows": beside * slowed,
        "replicas": layout.replicate,
        "copied_bytes": reduced / shards,
        "replica_bytes_per_s": found.ring(layout.replicate, shards * layout.tp),
        "copies_slow": slowed,
    }


def _updated(layout: Layout, share: StageShare) -> float:
    """Parameters of `share` that one rank updates, where all of them train."""
    if layout.zero_stage == 0:
        return share.parameters
    copies = layout.dp * layout.cp // layout.replicate
    expert_copies = max(1.0, copies * layout.tp / layout.ep) if layout.ep > 1 else copies
    return (share.dense + share.vocabulary) / copies + share.experts / expert_copies


def update_symbols(
    setup: Setup, share: StageShare, device_bytes_per_s: float
) -> dict[str, float]:
    """The optimizer's step, on the device or on the host (each is timed as AdamW's), and what
    offload copies between a rank's device, its host and disks, in bytes, and how fast.

    Weights are loaded for every pass: in 16 bits, while FSDP sends only its fp32 weights. A
    layer that is recomputed is loaded once in the backward pass, as ZeRO-3 keeps up to 1e9
    elements that are soon used again. Gradients leave in each backward pass, or the last one.
    Updated 16-bit weights return to where they compute. NVMe reads and writes states during the
    update.
    """
    workload, layout, cluster, efficiency = setup
    cost, width = workload.cost, workload.width
    held, shard = (_updated(layout, one) for one in (share, share.trained))
    away, on_disk = layout.offload_optimizer != "none", layout.offload_optimizer == "nvme"
    loads, stays = layout.offload_parameters != "none", not cost.sends_fp32_weights
    each, once = cost.gradient_copies(layout, width) if away else (0, 0)
    on_node = min(cluster.gpus_per_node, layout.world)
    memory = cluster.host_memory_bytes_per_s * efficiency["host.memory"] / on_node
    host = cluster.host_link_bytes_per_s * efficiency["link.host"]
    disk = cluster.nvme_bytes_per_s * efficiency["link.nvme"] / on_node
    return {
        "update_bytes": CPU_UPDATE_BYTES if away else UPDATE_BYTES,
        "updated": shard,
        "update_bytes_per_s": memory if away else device_bytes_per_s,
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
