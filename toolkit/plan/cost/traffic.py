"""The symbols of a step's communication: how much is sent, at which rate, and beside what."""

from dataclasses import dataclass
from functools import cached_property

from toolkit.layout import Layout
from toolkit.plan.cost.collectives import Group, Network
from toolkit.plan.cost.efficiency import Efficiency
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.exchange import ContextSplit, context_split
from toolkit.plan.cost.layer import Slice
from toolkit.plan.cost.stages import StageShare
from toolkit.plan.cost.workload import Workload
from toolkit.plan.hardware.cluster import Cluster


@dataclass(frozen=True)
class PlacedLayout:
    """A layout on a cluster."""

    workload: Workload
    layout: Layout
    cluster: Cluster
    efficiency: Efficiency
    network: Network

    @property
    def tokens(self) -> float:
        """Tokens of one micro batch on one rank of the context group."""
        return self.layout.micro_batch * self.workload.sample_tokens / self.layout.cp

    @property
    def slice(self) -> Slice:
        """What a rank computes of one micro batch."""
        layout, tokens = self.layout, int(self.tokens)
        parts = layout.cp // self.context.heads if layout.cp > 1 else 1
        return Slice(tokens, layout.tp, parts, layout.ep, layout.sequence_parallel)

    @cached_property
    def context(self) -> ContextSplit:
        """What a rank of a context group exchanges in a layer."""
        layout = self.layout
        return context_split(self.workload, layout.exchange, layout.tp, layout.cp, self.tokens)

    def group(self, size: int, stride: int) -> Group:
        """`size` ranks that are `stride` apart."""
        return self.network.group(size, stride)


def layer_traffic(place: PlacedLayout) -> dict[str, float]:
    """Collectives inside a layer. `back` and `again`: how much more is waited for in the
    backward pass, and by a layer that is recomputed."""
    layout, workload = place.layout, place.workload
    products = workload.cost.selective == "products"
    selective = layout.recompute == "selective"
    full = layout.recompute == "full" or isinstance(layout.recompute, int)
    group = place.group(layout.cp, layout.tp)
    gathered = place.context.heads == 1
    return {
        "tensor": layout.tp,
        "tensor_bytes": workload.width * place.tokens * workload.spec.hidden,
        "tensor_bytes_per_s": place.group(layout.tp, 1).bytes_per_s,
        "tensor_back": _backward_share(place),
        # Every second product: gathers are repeated, sums are kept.
        "tensor_again": 1.0 if full else 0.5 * (selective and products),
        # Keys and values, or heads, have to arrive before attention; their gradients go back.
        "context_bytes": workload.width * place.context.received,
        "context_bytes_per_s": group.bytes_per_s if gathered else group.exchange_bytes_per_s,
        "context_again": full or (selective and not products),
        "expert_again": full,
        **_expert_traffic(place),
    }


def _backward_share(place: PlacedLayout) -> float:
    """Exposed tensor-parallel traffic of the backward pass relative to the forward pass.

    The collectives of column-parallel products overlap with the gradients of their weights: all
    of the backward pass without sequence parallel, half of it with it.
    """
    slowed = place.efficiency["overlap.megatron"]
    return 0.5 + 0.5 * slowed if place.layout.sequence_parallel else slowed


def _expert_traffic(place: PlacedLayout) -> dict[str, float]:
    """Tokens are sent to their experts and back; the mean over layers."""
    layout, spec = place.layout, place.workload.spec
    group = place.group(layout.ep, layout.tp if layout.cp * layout.dp >= layout.ep else 1)
    tokens = place.tokens * spec.experts_per_token / layout.tp
    sent = place.workload.width * tokens * spec.hidden * (1 - 1 / layout.ep)
    return {
        "expert_bytes": 2 * sent * spec.moe_layers / spec.layers,
        "expert_bytes_per_s": group.exchange_bytes_per_s,
    }


def pipeline_traffic(place: PlacedLayout) -> dict[str, float]:
    """An activation, or its gradient, to the neighbour stage. Tensor-parallel ranks send a part
    each (Narayanan et al. 2021, arXiv:2104.04473, section 4.1). The interleaved schedule sends
    them beside the next chunk's computation, but while the pipeline is filled and drained."""
    layout, workload = place.layout, place.workload
    size = workload.width * place.tokens * workload.spec.hidden / layout.tp
    return {
        "stages": layout.pp,
        "pipeline_waited": place.efficiency["overlap.megatron"] if layout.vpp > 1 else 1.0,
        "pipeline_bytes": size if layout.pp > 1 else 0.0,
        "pipeline_bytes_per_s": place.network.message_bytes_per_s(layout.world // layout.pp),
    }


def reduce_bytes(workload: Workload) -> float:
    """Bytes per gradient element on the wire."""
    return FP32_BYTES if workload.reduce_bytes is None else workload.reduce_bytes


def data_traffic(
    place: PlacedLayout, share: StageShare, forward_s: float, backward_s: float
) -> dict[str, float]:
    """Gathering weights and reducing gradients, beside the passes of one micro batch.

    ZeRO-3 and FSDP gather a layer's weights for each pass of every micro batch, one layer
    ahead, and reduce its gradients. Otherwise gradients are reduced once per step beside the
    last backward pass, in stage 2, where they are never whole, every time; with a sharded
    optimizer, weights are then gathered beside the first forward pass (DeepSpeed: before it).
    Replicas of the shards sum their gradients once per step.
    """
    layout, workload, zero = place.layout, place.workload, place.layout.zero_stage
    ranks, steps = layout.dp * layout.cp, layout.gradient_accumulation
    several, shards = ranks > 1, ranks // layout.replicate
    slowed = place.efficiency[workload.cost.overlap]
    sharded, beside = zero == 3, zero == 3 or workload.reduce_overlap
    ahead = zero == 3 or (beside and workload.cost.gathers_beside_forward)
    held = share.parameters if sharded else share.trained.parameters
    gathered = workload.width * held if zero else 0.0
    reduced = reduce_bytes(workload) * share.trained.parameters
    copies = place.group(layout.replicate, shards * layout.tp)
    return {
        "data": shards,
        "data_bytes_per_s": place.group(shards, layout.tp).bytes_per_s,
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
        "replica_bytes_per_s": copies.bytes_per_s,
        "copies_slow": slowed,
    }
