"""Seconds of one training step: what every rank computes, sends and waits for.

A pipeline is as fast as its busiest stage; the others wait for it (the bubble). Closed forms
throughout: no loop over layers or micro batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log, sqrt
from typing import NamedTuple

from toolkit.hardware.cluster import Cluster
from toolkit.layout import Layout, Recompute
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.collectives import network
from toolkit.plan.cost.efficiency import DEFAULT, Efficiency
from toolkit.plan.cost.operators import (
    SAVED_PRODUCTS,
    Device,
    LayerTime,
    Pass,
    device,
    head_time,
    layer_time,
)
from toolkit.plan.cost.stages import (
    StageShare,
    layers_of_stages,
    recomputed_of_stages,
)
from toolkit.plan.cost.traffic import (
    DataTraffic,
    LayerTraffic,
    PlacedLayout,
    data_traffic,
    layer_traffic,
    messages_waited,
    pipeline_message_s,
)
from toolkit.plan.cost.update import offload_parts_s, optimizer_s
from toolkit.plan.cost.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the busiest stage; the parts add up to `total_s`."""

    compute: Mapping[str, float]
    """By kind: matmul, attention, elementwise, launch, recompute, logits."""
    communication: Mapping[str, float]
    """Exposed: tensor, context, expert, pipeline, data_gather, data_reduce."""
    bubble_s: float
    """Waiting for other pipeline stages."""
    optimizer_s: float
    offload_s: float
    """Transfers to and from host and NVMe that do not overlap with computation."""
    overhead_s: float
    """Waiting for the slowest node."""
    passes: list[tuple[float, float]]
    """Forward, with exposed collectives inside the layers, and backward, with recompute, of one
    micro batch, by pipeline rank: all its chunks together."""
    tokens: int
    """Of one step."""
    gpus: int
    peak_flops: float | None
    """Of one device in the workload's precision."""
    workload: Workload
    layout: Layout

    @property
    def total_s(self) -> float:
        """The whole step."""
        return (
            sum(self.compute.values())
            + sum(self.communication.values())
            + self.bubble_s
            + self.optimizer_s
            + self.offload_s
            + self.overhead_s
        )

    @property
    def tokens_per_s(self) -> float:
        """Of all devices."""
        return self.tokens / self.total_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of one device."""
        return self.tokens_per_s / self.gpus

    @property
    def mfu_causal(self) -> float | None:
        """Model FLOPs utilization, attention counted as masked."""
        return self._utilization("mfu_causal")

    @property
    def mfu_full(self) -> float | None:
        """Model FLOPs utilization, every query with every key (Megatron's papers, NVIDIA)."""
        return self._utilization("mfu_full")

    @property
    def hfu_causal(self) -> float | None:
        """Hardware FLOPs utilization: recomputed FLOPs count too; attention as masked."""
        return self._utilization("hfu_causal")

    @property
    def hfu_full(self) -> float | None:
        """Hardware FLOPs utilization, every query with every key."""
        return self._utilization("hfu_full")

    def _utilization(self, convention: str) -> float | None:
        if self.peak_flops is None:
            return None
        layout = self.layout
        ways = layout.recompute, layout.division
        per_token = _flops_per_token(self.workload, *ways)[convention]
        if layout.loss != "whole" and convention.startswith("hfu"):
            per_token += 2 * self.workload.spec.vocab * self.workload.spec.hidden
        return self.tokens_per_s_per_gpu * per_token / self.peak_flops


class StageParts(NamedTuple):
    """What all stages have in common, and the additional part of the last one."""

    layer: LayerTime
    traffic: LayerTraffic
    recomputed: tuple[float, ...]
    """Layers that recompute covers, by pipeline rank."""
    head: tuple[Pass, Pass]
    """Forward and backward of logits and loss."""

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Both passes of a layer, what recompute adds, and both passes of the head."""
        layer = self.layer.forward.total + self.traffic.forward
        layer += self.layer.backward.total + self.traffic.backward
        head = sum(one.total for one in self.head)
        return layer, self.layer.recompute.total + self.traffic.again, head

    def passes(self, counts: tuple[int, ...]) -> list[tuple[float, float]]:
        """Forward and backward of every stage for one micro batch, by its layers."""
        again = self.layer.recompute.total + self.traffic.again
        forward = self.layer.forward.total + self.traffic.forward
        backward = self.layer.backward.total + self.traffic.backward
        found = [
            (count * forward, count * backward + recomputed * again)
            for count, recomputed in zip(counts, self.recomputed, strict=True)
        ]
        ahead, back = self.head
        found[-1] = (found[-1][0] + ahead.total, found[-1][1] + back.total)
        return found


@dataclass(frozen=True)
class BusiestStage:
    """What the parts of a step's time are computed from."""

    place: PlacedLayout
    machine: Device
    parts: StageParts
    passes: list[tuple[float, float]]
    """Forward and backward of one micro batch, by pipeline rank."""
    share: StageShare
    """What a rank of the busiest stage holds."""

    @property
    def others_s(self) -> float:
        """One micro batch on all other stages."""
        return sum(map(sum, self.passes)) - sum(self.passes[self.share.stage])

    @property
    def data(self) -> DataTraffic:
        """The communication of data parallelism."""
        return data_traffic(self.place, self.share, *self.passes[self.share.stage])


def busiest_stage(
    workload: Workload, layout: Layout, cluster: Cluster, efficiency: Efficiency = DEFAULT
) -> BusiestStage:
    """The slowest pipeline stage of `workload` in `layout` on `cluster`.

    Raises PlanError if an accelerator lacks the workload's precision.
    """
    workload = workload.in_layout(layout)
    place = PlacedLayout(workload, layout, cluster, efficiency, network(cluster, efficiency))
    machine = device(cluster.gpu, workload, efficiency)
    parts = _parts(workload, layout, cluster, efficiency)
    passes = parts.passes(layers_of_stages(workload.spec.layers, *layout.division))
    times = [sum(pair) for pair in passes]
    stage = times.index(max(times))
    share = workload.share(layout.tp, layout.ep, *layout.division, stage)
    return BusiestStage(place, machine, parts, passes, share)


def least_step_s(
    workload: Workload, layout: Layout, cluster: Cluster, sizes: Sequence[int]
) -> Iterator[float]:
    """A lower bound of a step's seconds with each micro batch of `sizes`; `layout` has a micro
    batch of 1: the passes of all micro batches and the bubble, with stages that are as even as
    possible."""
    workload, one, layers = workload.in_layout(layout), _of_layers(layout), workload.spec.layers
    most = max(layers_of_stages(layers, *layout.division))
    again = sum(recomputed_of_stages(layout.recompute, layers, *layout.division))
    known = _layers_and_head_s(workload, one, cluster, layout.pp == 1)
    for size in sizes:
        if size not in known:
            parts = _parts(workload, replace(layout, micro_batch=size), cluster, DEFAULT)
            known[size] = parts.seconds
        layer_s, again_s, head_s = known[size]
        whole = layers * layer_s + again * again_s + head_s
        busiest = max(most * layer_s, whole / layout.pp)
        yield layout.gradient_accumulation / size * busiest + (whole - busiest) / layout.vpp


@lru_cache(maxsize=1 << 10)
def _layers_and_head_s(
    *_where: Workload | Layout | Cluster | bool,
) -> dict[int, tuple[float, ...]]:
    """Known seconds by micro batch."""
    return {}


def step_time(
    workload: Workload, layout: Layout, cluster: Cluster, efficiency: Efficiency = DEFAULT
) -> StepTime:
    """Seconds of one step of `workload` in `layout` on `cluster`.

    Raises PlanError if the accelerator lacks the workload's precision.
    """
    busiest = busiest_stage(workload, layout, cluster, efficiency)
    place, share = busiest.place, busiest.share
    compute = _compute(busiest)
    bubble = busiest.others_s / layout.vpp
    update = optimizer_s(place, share, busiest.machine)
    offload = offload_parts_s(place, share, update, *busiest.passes[share.stage])
    return StepTime(
        compute=compute,
        communication=_communication(busiest),
        bubble_s=bubble,
        optimizer_s=update,
        offload_s=sum(offload.values()),
        overhead_s=_overhead_s(place, sum(compute.values()) + bubble),
        passes=busiest.passes,
        tokens=layout.global_batch * workload.sample_tokens,
        gpus=layout.world,
        peak_flops=cluster.gpu.peak_flops(workload.precision),
        workload=place.workload,
        layout=layout,
    )


def _parts(
    workload: Workload, layout: Layout, cluster: Cluster, efficiency: Efficiency
) -> StageParts:
    parts = _layer_and_head(workload, _of_layers(layout), cluster, efficiency)
    spec, division = workload.spec, layout.division
    # In a pipeline, a stage whose layers all train is the slowest.
    layer = parts.layer.reached(spec.reached) if layout.pp == 1 else parts.layer
    share = workload.recomputed_layers
    recomputed = recomputed_of_stages(layout.recompute, spec.layers, *division, share)
    return parts._replace(layer=layer, recomputed=recomputed)


def _of_layers(layout: Layout) -> Layout:
    """What decides how long a layer and the head take for one micro batch."""
    return Layout(
        dp=layout.dp if layout.ep > 1 else 1,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        recompute="full" if isinstance(layout.recompute, int) else layout.recompute,
        loss=layout.loss,
        exchange=layout.exchange,
        micro_batch=layout.micro_batch,
    )


@lru_cache(maxsize=1 << 13)
def _layer_and_head(
    workload: Workload, layout: Layout, cluster: Cluster, efficiency: Efficiency
) -> StageParts:
    """The parts of stages whose layers are not counted yet."""
    place = PlacedLayout(workload, layout, cluster, efficiency, network(cluster, efficiency))
    machine = device(cluster.gpu, workload, efficiency)
    part = place.slice
    layer = layer_time(workload, part, layout.recompute, machine)
    traffic = layer_traffic(place)
    return StageParts(layer, traffic, (), head_time(workload, part, layout.loss, machine))


def _compute(busiest: BusiestStage) -> dict[str, float]:
    """Seconds per step that the stage computes, by kind."""
    layout, parts, share = busiest.place.layout, busiest.parts, busiest.share
    layer, steps = parts.layer, layout.gradient_accumulation
    many = steps * share.layers
    kinds = {
        kind: many * (getattr(layer.forward, kind) + getattr(layer.backward, kind))
        for kind in ("matmul", "attention", "elementwise", "launch")
    }
    head = sum(one.total for one in parts.head) if share.stage == layout.pp - 1 else 0.0
    again = steps * parts.recomputed[share.stage] * layer.recompute.total
    return {**kinds, "recompute": again, "logits": steps * head}


def _communication(busiest: BusiestStage) -> dict[str, float]:
    """Exposed seconds per step of the stage's traffic, by kind."""
    parts = busiest.parts
    layout, traffic, data = busiest.place.layout, parts.traffic, busiest.data
    steps = layout.gradient_accumulation
    many = steps * busiest.share.layers
    recomputed = parts.recomputed[busiest.share.stage]
    again = recomputed * traffic.tensor_again
    return {
        "tensor": many * (traffic.tensor + traffic.tensor_back) + steps * again,
        "context": many * 2 * traffic.context + steps * recomputed * traffic.context_again,
        "expert": many * 2 * traffic.expert,
        "pipeline": messages_waited(busiest.place) * pipeline_message_s(busiest.place),
        "data_gather": data.gather_s,
        "data_reduce": data.reduce_s,
    }


def _overhead_s(place: PlacedLayout, computed_s: float) -> float:
    """Waiting for the slowest of n nodes whose speeds spread by `straggler`: the expected
    largest of n normal values is about √(2·ln n) standard deviations."""
    nodes = place.layout.world / place.cluster.gpus_per_node
    if nodes <= 1:
        return 0.0
    return place.efficiency["straggler"] * sqrt(2 * log(nodes)) * computed_s


@lru_cache(maxsize=1024)
def _flops_per_token(
    workload: Workload, recompute: Recompute, division: tuple[int, int, tuple[int, ...]]
) -> Mapping[str, float]:
    """FLOPs per token of training (mfu), and including recompute (hfu), attention counted as
    masked (causal) or in full."""
    spec, length = workload.spec, workload.sequence_length
    found = {}
    share = sum(recomputed_of_stages(recompute, spec.layers, *division)) / spec.layers
    for convention in ("causal", "full"):
        causal = convention == "causal"
        forward = spec.forward_flops_per_token(length, causal=causal)
        training = spec.flops_per_token(length, causal=causal)
        again = _recomputed_flops(workload, recompute, share, forward)
        found[f"mfu_{convention}"] = training
        found[f"hfu_{convention}"] = training + spec.reached * again
    return found


def _recomputed_flops(
    workload: Workload, recompute: Recompute, share: float, forward: float
) -> float:
    """Forward FLOPs per token that the backward pass recomputes, of which `share` of the layers
    as a whole."""
    spec = workload.spec
    attention = forward - _weight_flops(spec)
    products = _weight_flops(spec) - 2 * spec.vocab * spec.hidden
    if recompute == "full" or isinstance(recompute, int):
        return workload.recomputed_layers * share * (products + attention)
    if recompute == "none":
        return 0.0
    if workload.cost.selective == "attention":
        return attention
    return (1 - SAVED_PRODUCTS) * products


def _weight_flops(spec: ModelSpec) -> float:
    """Forward FLOPs per token of everything but the scores: a sequence of one token has one
    score per head and layer, and its product with the values."""
    return spec.forward_flops_per_token(1, causal=False) - spec.score_flops
