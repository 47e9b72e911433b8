"""The communication of a step, and how long computation waits for it.

Every function returns exposed seconds: overlapped communication counts only as far as it takes
longer than computation, or slows computation down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from toolkit.hardware.cluster import Cluster
from toolkit.layout import Layout
from toolkit.plan.cost.collectives import CollectiveKind, Collectives, Group, Network
from toolkit.plan.cost.efficiency import Efficiency
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.exchange import ContextSplit, context_split
from toolkit.plan.cost.layer import Slice
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
    def tokens(self) -> float:
        """Of one micro batch on one rank of the context group."""
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


class Overlapped(NamedTuple):
    """Communication next to computation."""

    sent: tuple[Collectives, ...]
    computed_s: float
    slowed: float
    """Seconds by which one second of communication slows computation down."""
    times: float = 1
    """Per step."""

    @property
    def sent_s(self) -> float:
        """Of all communication."""
        return sum(one.seconds for one in self.sent)

    @property
    def exposed_s(self) -> float:
        """Per step."""
        return self.times * exposed(self.sent_s, self.computed_s, self.slowed)


@dataclass(frozen=True)
class LayerTraffic:
    """Exposed seconds of one layer and micro batch, in each pass."""

    tensor: float = 0.0
    tensor_back: float = 0.0
    tensor_again: float = 0.0
    """Repeated by recompute, with that of experts."""
    context: float = 0.0
    """Of its forward pass; the backward pass sends the gradients of the same."""
    context_again: float = 0.0
    exchanged: tuple[Collectives, ...] = ()
    """What the context group's seconds are of."""
    expert: float = 0.0

    @property
    def again(self) -> float:
        """Added to the backward pass of a layer that is recomputed."""
        return self.tensor_again + self.context_again

    @property
    def forward(self) -> float:
        """Added to the forward pass."""
        return self.tensor + self.context + self.expert

    @property
    def backward(self) -> float:
        """Added to the backward pass."""
        return self.tensor_back + self.context + self.expert


def layer_traffic(place: PlacedLayout) -> LayerTraffic:
    """Collectives inside a layer."""
    tensor, expert = _layer_tensor_s(place), _expert_s(place)
    back = tensor * _backward_share(place)
    layout = place.layout
    exchanged = _exchanged(place) if layout.cp > 1 else ()
    context = sum(one.seconds for one in exchanged)
    again = context_again = 0.0
    if layout.recompute == "full" or isinstance(layout.recompute, int):
        again, context_again = tensor + expert, context
    elif layout.recompute == "selective" and place.workload.cost.selective == "products":
        again = 0.5 * tensor  # gathers are repeated, sums are kept
    elif layout.recompute == "selective":
        context_again = context
    return LayerTraffic(tensor, back, again, context, context_again, exchanged, expert)


def layer_collectives(place: PlacedLayout) -> list[Collectives]:
    """Two all-reduces per pass, or a reduce-scatter and an all-gather instead of each
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2)."""
    layout = place.layout
    if layout.tp == 1:
        return []
    ring = place.group(layout.tp, 1)
    size = place.workload.width * place.tokens * place.workload.spec.hidden
    kinds: tuple[CollectiveKind, ...] = ("all_reduce",)
    if layout.sequence_parallel:
        kinds = ("all_gather", "reduce_scatter")
    return [Collectives(kind, ring, size, 2) for kind in kinds]


def _layer_tensor_s(place: PlacedLayout) -> float:
    """Exposed seconds of a layer's collectives in each pass."""
    sent = sum(one.seconds for one in layer_collectives(place))
    everywhere = place.workload.tensor_overlap == "all"
    return sent * (place.efficiency["overlap.tensor"] if everywhere else 1.0)


def _backward_share(place: PlacedLayout) -> float:
    """Exposed tensor-parallel traffic of the backward pass relative to the forward pass.

    The collectives of column-parallel products overlap with the gradients of their weights: all
    of the backward pass without sequence parallel, half of it with it.
    """
    workload = place.workload
    if workload.tensor_overlap != "backward":
        return 1.0
    slowed = place.efficiency["overlap.megatron"]
    return 0.5 + 0.5 * slowed if place.layout.sequence_parallel else slowed


def _exchanged(place: PlacedLayout) -> tuple[Collectives, ...]:
    """Gathered keys and values, or heads that are sent: they have to arrive before attention,
    and their gradients go back."""
    layout, width, split = place.layout, place.workload.width, place.context
    group = place.group(layout.cp, layout.tp)
    if split.heads == 1:
        return (Collectives("all_gather", group, 2 * width * split.attended_key),)
    return (
        Collectives("all_to_all", group, width * split.query, 2),
        Collectives("all_to_all", group, width * split.sent_key, 2),
    )


def _expert_s(place: PlacedLayout) -> float:
    """Tokens are sent to their experts and back."""
    layout, spec = place.layout, place.workload.spec
    if layout.ep == 1:
        return 0.0
    everyone = place.group(layout.ep, layout.tp if layout.cp * layout.dp >= layout.ep else 1)
    size = (
        place.workload.width * place.tokens * spec.experts_per_token * spec.hidden / layout.tp
    )
    return 2 * everyone.all_to_all_s(size) * spec.moe_layers / spec.layers


def pipeline_message_s(place: PlacedLayout) -> float:
    """One activation, or its gradient, to the neighbour stage. Tensor-parallel ranks send a
    part each (Narayanan et al. 2021, arXiv:2104.04473, section 4.1)."""
    layout = place.layout
    if layout.pp == 1:
        return 0.0
    size = place.workload.width * place.tokens * place.workload.spec.hidden / layout.tp
    return place.network.message_s(size, layout.world // layout.pp)


def messages_waited(place: PlacedLayout) -> float:
    """Messages per step that a rank waits for: of each micro batch and chunk an activation and
    a gradient, which the interleaved schedule sends beside the next chunk's computation, and
    all while the pipeline is filled and drained."""
    layout = place.layout
    waited = place.efficiency["overlap.megatron"] if layout.vpp > 1 else 1.0
    return 2 * (waited * layout.vpp * layout.gradient_accumulation + layout.pp - 1)


def reduce_bytes(workload: Workload) -> float:
    """Bytes per gradient element on the wire."""
    return FP32_BYTES if workload.reduce_bytes is None else workload.reduce_bytes


class DataTraffic(NamedTuple):
    """Communication of data parallelism, by when it happens."""

    gather: Mapping[str, Overlapped]
    """Of weights."""
    reduce: Mapping[str, Overlapped]
    """Of gradients."""

    @property
    def gather_s(self) -> float:
        """Exposed seconds per step."""
        return sum(one.exposed_s for one in self.gather.values())

    @property
    def reduce_s(self) -> float:
        """Exposed seconds per step."""
        return sum(one.exposed_s for one in self.reduce.values())


def data_traffic(
    place: PlacedLayout, share: StageShare, forward_s: float, backward_s: float
) -> DataTraffic:
    """Gathering weights and reducing gradients.

    `forward_s` and `backward_s` are the passes of one micro batch of the whole stage.
    """
    layout = place.layout
    if layout.dp * layout.cp == 1:
        return DataTraffic({}, {})
    spread = _sharded if layout.zero_stage == 3 else _replicated
    gather, reduce = spread(place, share, forward_s, backward_s)
    return DataTraffic(gather, {**reduce, **_copies(place, share, backward_s)})


def _copies(place: PlacedLayout, share: StageShare, backward_s: float) -> dict[str, Overlapped]:
    """Replicas of the shards sum their gradients once per step, layer by layer."""
    layout, layers = place.layout, max(1, share.layers)
    if layout.replicate == 1:
        return {}
    shards = layout.dp * layout.cp // layout.replicate
    between = place.group(layout.replicate, shards * layout.tp)
    size = reduce_bytes(place.workload) * share.trained.parameters / shards
    sent = Collectives("all_reduce", between, size / layers, layers)
    slowed = place.efficiency[place.workload.cost.overlap]
    return {"replicas": Overlapped((sent,), backward_s, slowed)}


def _sharded(
    place: PlacedLayout, share: StageShare, forward_s: float, backward_s: float
) -> DataTraffic:
    """ZeRO-3 and FSDP: for every micro batch, weights are gathered layer by layer for each
    pass, one ahead, and gradients reduced."""
    layout, layers = place.layout, max(1, share.layers)
    ring = place.group(layout.dp * layout.cp // layout.replicate, layout.tp)
    weights = place.workload.width * share.parameters / layers
    gather = Collectives("all_gather", ring, weights, layers)
    size = reduce_bytes(place.workload) * share.trained.parameters
    reduce = Collectives("reduce_scatter", ring, size / layers, layers)
    slowed = place.efficiency[place.workload.cost.overlap]
    steps = layout.gradient_accumulation
    again = gather.seconds / (gather.seconds + reduce.seconds)
    back = Overlapped((gather, reduce), backward_s, slowed)
    return DataTraffic(
        {
            "forward": Overlapped((gather,), forward_s, slowed, steps),
            "backward": back._replace(times=steps * again),
        },
        {"backward": back._replace(times=steps * (1 - again))},
    )


def _replicated(
    place: PlacedLayout, share: StageShare, forward_s: float, backward_s: float
) -> DataTraffic:
    """Gradients are reduced once per step, overlapping with the last micro batch's backward
    pass; with a sharded optimizer, gathering the weights then overlaps with the first forward
    pass (DeepSpeed: no overlap)."""
    layout, workload = place.layout, place.workload
    ring = place.group(layout.dp * layout.cp // layout.replicate, layout.tp)
    slowed = place.efficiency[workload.cost.overlap]
    # In stage 2, gradients are never whole: reduced every time.
    times = layout.gradient_accumulation if layout.zero_stage == 2 else 1
    kind: CollectiveKind = "reduce_scatter"
    gathers: dict[str, Overlapped] = {}
    if layout.zero_stage == 0:
        kind = "all_reduce"
    else:
        weights = Collectives(
            "all_gather", ring, place.workload.width * share.trained.parameters
        )
        beside = workload.reduce_overlap and workload.cost.gathers_beside_forward
        gathers["update"] = Overlapped((weights,), forward_s * beside, slowed * beside)
    reduce = Collectives(kind, ring, reduce_bytes(workload) * share.trained.parameters)
    beside = workload.reduce_overlap
    backward = Overlapped((reduce,), backward_s * beside, slowed * beside, times)
    return DataTraffic(gathers, {"backward": backward})


def exposed(sent: float, compute: float, slowed: float) -> float:
    """Communication that computation does not hide, or the time by which it slows computation
    down."""
    return max(sent - compute, slowed * sent)
