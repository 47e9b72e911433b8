"""The communication of a step, and how long computation waits for it.

Every function returns exposed seconds: overlapped communication counts only as far as it takes
longer than computation, or slows computation down.
"""

from dataclasses import dataclass

from toolkit.hardware.cluster import Cluster
from toolkit.layout import Layout
from toolkit.plan.cost.collectives import Group, Network
from toolkit.plan.cost.efficiency import Efficiency
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.stages import StageShare
from toolkit.plan.cost.workload import Workload


@dataclass(frozen=True)
class PlacedLayout:
    """A layout on a cluster."""

    workload: Workload
    layout: Layout
    cluster: Cluster
    efficiency: Efficiency
    network: Network

    @property
    def width(self) -> int:
        """Bytes of an activation element in communication."""
        return 4 if self.workload.precision == "fp32" else 2

    @property
    def tokens(self) -> float:
        """Of one micro batch on one rank of the context group."""
        return self.layout.micro_batch * self.workload.sample_tokens / self.layout.cp

    def group(self, size: int, stride: int) -> Group:
        """`size` ranks that are `stride` apart."""
        return self.network.group(size, stride)


@dataclass(frozen=True)
class LayerTraffic:
    """Exposed seconds of one layer and micro batch, in each pass."""

    tensor: float = 0.0
    tensor_back: float = 0.0
    tensor_again: float = 0.0
    """Repeated by recompute."""
    context: float = 0.0
    """Of the forward pass; the backward pass also sends the gradients: twice as much."""
    expert: float = 0.0

    @property
    def forward(self) -> float:
        """Added to the forward pass."""
        return self.tensor + self.context + self.expert

    @property
    def backward(self) -> float:
        """Added to the backward pass."""
        return self.tensor_back + 2 * self.context + self.expert


def layer_traffic(place: PlacedLayout, attention_s: float) -> LayerTraffic:
    """Collectives inside a layer whose attention takes `attention_s`."""
    tensor, expert = layer_tensor_s(place), _expert_s(place)
    back = tensor * _backward_share(place)
    layout = place.layout
    again = 0.0
    if layout.recompute == "full":
        again = tensor + expert
    elif layout.recompute == "selective" and place.workload.cost.selective == "products":
        again = 0.5 * tensor  # gathers are repeated, sums are kept
    return LayerTraffic(tensor, back, again, _context_s(place, attention_s), expert)


def layer_tensor_s(place: PlacedLayout) -> float:
    """Two all-reduces per pass, or a reduce-scatter and an all-gather instead of each
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2)."""
    layout = place.layout
    if layout.tp == 1:
        return 0.0
    ring = place.group(layout.tp, 1)
    size = place.width * place.tokens * place.workload.spec.hidden
    if layout.sequence_parallel:
        once = ring.all_gather_s(size) + ring.reduce_scatter_s(size)
    else:
        once = ring.all_reduce_s(size)
    everywhere = place.workload.tensor_overlap == "all"
    return 2 * once * (place.efficiency["overlap.tensor"] if everywhere else 1.0)


def _backward_share(place: PlacedLayout) -> float:
    """Exposed tensor-parallel traffic of the backward pass relative to the forward pass.

    The collectives of column-parallel products overlap with the gradients of their weights: all
    of the backward pass without sequence parallel, half of it with it.
    """
    if place.workload.tensor_overlap != "backward":
        return 1.0
    slowed = place.efficiency["overlap.megatron"]
    return 0.5 + 0.5 * slowed if place.layout.sequence_parallel else slowed


def _context_s(place: PlacedLayout, attention_s: float) -> float:
    """Keys and values circulate in the context group while attention processes the local
    ones."""
    layout, spec = place.layout, place.workload.spec
    if layout.cp == 1:
        return 0.0
    ring = place.group(layout.cp, layout.tp)
    keys_values = 2 * place.width * place.tokens * spec.kv_heads * spec.head_dim / layout.tp
    steps = layout.cp - 1
    sent = steps * (keys_values / ring.bytes_per_s + ring.far_latency_s)
    compute = attention_s * steps / layout.cp
    return _exposed(sent, compute, place.efficiency["overlap.megatron"])


def _expert_s(place: PlacedLayout) -> float:
    """Tokens are sent to their experts and back."""
    layout, spec = place.layout, place.workload.spec
    if layout.ep == 1:
        return 0.0
    everyone = place.group(layout.ep, layout.tp if layout.cp * layout.dp >= layout.ep else 1)
    size = place.width * place.tokens * spec.experts_per_token * spec.hidden / layout.tp
    return 2 * everyone.all_to_all_s(size) * spec.moe_layers / spec.layers


def pipeline_message_s(place: PlacedLayout) -> float:
    """One activation, or its gradient, to the neighbour stage. Tensor-parallel ranks send a
    part each (Narayanan et al. 2021, arXiv:2104.04473, section 4.1)."""
    layout = place.layout
    if layout.pp == 1:
        return 0.0
    size = place.width * place.tokens * place.workload.spec.hidden / layout.tp
    return place.network.message_s(size, layout.world // layout.pp)


def reduce_bytes(workload: Workload) -> float:
    """Bytes per gradient element on the wire."""
    return FP32_BYTES if workload.reduce_bytes is None else workload.reduce_bytes


def data_parallel_s(
    place: PlacedLayout, share: StageShare, forward_s: float, backward_s: float
) -> tuple[float, float]:
    """Exposed seconds per step of gathering weights and of reducing gradients.

    `forward_s` and `backward_s` are the passes of one micro batch of the whole stage.
    """
    layout = place.layout
    if layout.dp * layout.cp == 1:
        return 0.0, 0.0
    spread = _sharded_s if layout.zero_stage == 3 else _replicated_s
    gather, reduce = spread(place, share, forward_s, backward_s)
    return gather, reduce + _copies_s(place, share, backward_s)


def _copies_s(place: PlacedLayout, share: StageShare, backward_s: float) -> float:
    """Replicas of the shards sum their gradients once per step, layer by layer."""
    layout, layers = place.layout, max(1, share.layers)
    if layout.replicate == 1:
        return 0.0
    shards = layout.dp // layout.replicate
    between = place.group(layout.replicate, shards * layout.tp * layout.cp)
    size = reduce_bytes(place.workload) * share.trained.parameters / shards
    sent = layers * between.all_reduce_s(size / layers)
    return _exposed(sent, backward_s, place.efficiency[place.workload.cost.overlap])


def _sharded_s(
    place: PlacedLayout, share: StageShare, forward_s: float, backward_s: float
) -> tuple[float, float]:
    """ZeRO-3 and FSDP: for every micro batch, weights are gathered layer by layer for each
    pass, one ahead, and gradients reduced. With a second copy of the weights, all passes except
    the first gather from it (ZeRO++, arXiv:2306.10209, section 3.2)."""
    layout, layers = place.layout, max(1, share.layers)
    ring = place.group(layout.dp * layout.cp // layout.replicate, layout.tp)
    weights = (place.workload.gather_bytes or place.width) * share.parameters / layers
    first = gather = layers * ring.all_gather_s(weights)
    if layout.hpz > 1:
        gather = layers * place.group(layout.hpz, 1).all_gather_s(weights)
    size = reduce_bytes(place.workload) * share.trained.parameters
    reduce = layers * ring.reduce_scatter_s(size / layers)
    slowed = place.efficiency[place.workload.cost.overlap]
    before = _exposed(first, forward_s, slowed)
    later = _exposed(gather, forward_s, slowed)
    after = _exposed(gather + reduce, backward_s, slowed)
    steps = layout.gradient_accumulation
    again = gather / (gather + reduce)
    return before + (steps - 1) * later + steps * again * after, steps * (1 - again) * after


def _replicated_s(
    place: PlacedLayout, share: StageShare, forward_s: float, backward_s: float
) -> tuple[float, float]:
    """Gradients are reduced once per step, overlapping with the last micro batch's backward
    pass; with a sharded optimizer, gathering the weights then overlaps with the first forward
    pass (DeepSpeed: no overlap)."""
    layout, workload = place.layout, place.workload
    ring = place.group(layout.dp * layout.cp // layout.replicate, layout.tp)
    size = reduce_bytes(workload) * share.trained.parameters
    times, gather = 1, 0.0
    if layout.zero_stage == 0:
        reduce = ring.all_reduce_s(size)
    else:
        reduce = ring.reduce_scatter_s(size)
        gather = ring.all_gather_s(place.width * share.trained.parameters)
    if layout.zero_stage == 2:
        times = layout.gradient_accumulation  # gradients are never whole: reduced every time
    if not workload.reduce_overlap:
        return gather, times * reduce
    slowed = place.efficiency[workload.cost.overlap]
    if workload.cost.gathers_beside_forward:
        gather = _exposed(gather, forward_s, slowed)
    return gather, times * _exposed(reduce, backward_s, slowed)


def tied_embedding_s(place: PlacedLayout) -> float:
    """The first and the last stage sum their gradients of a shared embedding."""
    layout, spec = place.layout, place.workload.spec
    frozen = spec.adapters or (spec.frozen and spec.frozen.embedding)
    if layout.pp == 1 or not spec.tied_embeddings or frozen:
        return 0.0
    pair = place.group(2, layout.world - layout.world // layout.pp)
    return pair.all_reduce_s(
        reduce_bytes(place.workload) * spec.vocab * spec.hidden / layout.tp
    )


def _exposed(sent: float, compute: float, slowed: float) -> float:
    """Communication that computation does not hide, or the time by which it slows computation
    down."""
    return max(sent - compute, slowed * sent)
