"""The symbols of one training step's time: what every rank computes, sends and waits for.

A pipeline is as fast as its busiest stage; the others wait for it (the bubble). Closed forms
throughout (`terms.STEP`): no loop over layers or micro batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from toolkit.hardware.cluster import Cluster
from toolkit.layout import Layout, Recompute
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost import terms
from toolkit.plan.cost.collectives import network
from toolkit.plan.cost.efficiency import DEFAULT, Efficiency
from toolkit.plan.cost.operators import (
    SAVED_PRODUCTS,
    attention_kernel,
    device,
    head_time,
    layer_time,
)
from toolkit.plan.cost.stages import (
    layers_of_stages,
    recomputed_of_stages,
)
from toolkit.plan.cost.traffic import (
    PlacedLayout,
    data_traffic,
    layer_traffic,
    pipeline_traffic,
)
from toolkit.plan.cost.update import host_copies, update_symbols
from toolkit.plan.cost.workload import Workload

Convention = Literal["mfu_causal", "mfu_full", "hfu_causal", "hfu_full"]
"""Utilization by the model's FLOPs, or also those that are recomputed; attention counted as
masked, or every query with every key (Megatron's papers, NVIDIA)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the busiest stage."""

    place: PlacedLayout
    symbols: Mapping[str, float]
    """Those of `terms.STEP`, with the values of its rows."""

    def __getitem__(self, name: str) -> float:
        return self.symbols[name]

    @cached_property
    def parts(self) -> dict[str, float]:
        """A step by part; the parts add up to `total_s`."""
        return terms.STEP.parts(self.symbols)

    @cached_property
    def total_s(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.place.layout.global_batch * self.place.workload.sample_tokens

    @property
    def tokens_per_s(self) -> float:
        """Of all devices."""
        return self.tokens / self.total_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of one device."""
        return self.tokens_per_s / self.place.layout.world

    def utilization(self, convention: Convention = "mfu_causal") -> float | None:
        """Of the device's peak; None where none is known."""
        symbols = self.of_peak(convention)
        if symbols is None:
            return None
        return terms.UTILIZATION.evaluate(symbols)["utilization"]

    def of_peak(self, convention: Convention) -> dict[str, float] | None:
        """The symbols of `terms.UTILIZATION`."""
        place, peak = (
            self.place,
            self.place.cluster.gpu.peak_flops(self.place.workload.precision),
        )
        if peak is None:
            return None
        layout, workload = place.layout, place.workload
        per_token = _flops_per_token(workload, layout.recompute, layout.division)[convention]
        if layout.loss != "whole" and convention.startswith("hfu"):
            per_token += 2 * workload.spec.vocab * workload.spec.hidden
        return {
            "tokens": self.tokens,
            "flops_per_token": per_token,
            "step_s": self.total_s,
            "gpus": layout.world,
            "peak_flops_per_s": peak,
        }

    def constants(self) -> list[str]:
        """Names in `efficiency.TABLE` of what decides its rates."""
        place, gpu = self.place, self.place.cluster.gpu
        of = ".cpu" if gpu.generation == "cpu" else ""
        links = {place.cluster.node_link.kind, place.cluster.network.kind}
        return [
            f"matmul.{gpu.like or gpu.name}",
            f"matmul.half_k{of}",
            f"attention.{attention_kernel(gpu, place.workload)}",
            f"attention.half_sequence{of}",
            "memory",
            f"kernel.gap_s{of}",
            *sorted(f"link.{kind}" for kind in links),
            place.workload.cost.overlap,
        ]


def step_time(
    workload: Workload, layout: Layout, cluster: Cluster, efficiency: Efficiency = DEFAULT
) -> StepTime:
    """Seconds of one step of `workload` in `layout` on `cluster`.

    Raises PlanError if the accelerator lacks the workload's precision.
    """
    workload = workload.in_layout(layout)
    place = PlacedLayout(workload, layout, cluster, efficiency, network(cluster, efficiency))
    machine = device(cluster.gpu, workload, efficiency)
    counts = layers_of_stages(workload.spec.layers, *layout.division)
    layer = dict(_layer(workload, _of_layers(layout), cluster, efficiency, layout.pp == 1))
    each_s, head_s = layer["forward_s"] + layer["backward_s"], layer["head_s"]
    recomputed = recomputed_of_stages(layout.recompute, workload.spec.layers, *layout.division)
    stages = [
        count * each_s + again * layer["repeated_s"]
        for count, again in zip(counts, recomputed, strict=True)
    ]
    stages[-1] += head_s
    stage = stages.index(max(stages))
    last = stage == layout.pp - 1
    share = workload.share(layout.tp, layout.ep, *layout.division, stage)
    forward_s = share.layers * layer["forward_s"] + last * layer["head_forward_s"]
    backward_s = stages[stage] - forward_s
    symbols = {
        **layer,
        "micro_batches": layout.gradient_accumulation,
        "layers": share.layers,
        "recomputed": recomputed[stage],
        "chunks": layout.vpp,
        "last": last,
        "stage_forward_s": forward_s,
        "stage_backward_s": backward_s,
        "other_stages_s": sum(stages) - stages[stage],
        "spread": efficiency["straggler"],
        "nodes": max(1.0, layout.world / cluster.gpus_per_node),
        **pipeline_traffic(place),
        **data_traffic(place, share, forward_s, backward_s),
        **update_symbols(place, share, machine),
        **host_copies(place, share),
    }
    return StepTime(place, terms.STEP.evaluate(symbols))


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
def _layer(
    workload: Workload, layout: Layout, cluster: Cluster, efficiency: Efficiency, alone: bool
) -> Mapping[str, float]:
    """The symbols of a layer and the head. In a pipeline, a stage whose layers all train is the
    slowest; `alone`: there is none."""
    place = PlacedLayout(workload, layout, cluster, efficiency, network(cluster, efficiency))
    machine, part = device(cluster.gpu, workload, efficiency), place.slice
    layer = layer_time(workload, part, layout.recompute, machine)
    if alone:
        layer = layer.reached(workload.spec.reached)
    forward, backward = layer.forward, layer.backward
    head_forward_s, head_backward_s = head_time(workload, part, layout.loss, machine)
    symbols = {
        f"{name}_{kind}_s": getattr(one, kind)
        for name, one in zip(("forward", "backward", "again"), layer, strict=True)
        for kind in ("matmul", "attention", "elementwise", "launch")
    }
    symbols |= {
        "forward_flops": forward.flops,
        "backward_flops": backward.flops,
        "reached_flops_per_s": (forward.flops + backward.flops)
        / (forward.matmul + backward.matmul),
        "forward_bytes": machine.memory * forward.elementwise,
        "backward_bytes": machine.memory * backward.elementwise,
        "memory_bytes_per_s": machine.memory,
        "head_forward_s": head_forward_s,
        "head_backward_s": head_backward_s,
        **layer_traffic(place),
    }
    return terms.LAYER.evaluate(symbols)


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
    if recompute == "none":
        return 0.0
    spec = workload.spec
    attention = forward - _weight_flops(spec)
    products = _weight_flops(spec) - 2 * spec.vocab * spec.hidden
    if recompute == "selective" and workload.cost.selective == "products":
        return (1 - SAVED_PRODUCTS) * products
    return attention if recompute == "selective" else share * (products + attention)


def _weight_flops(spec: ModelSpec) -> float:
    """Forward FLOPs per token of everything but the scores: a sequence of one token has one
    score per head and layer, and its product with the values."""
    return spec.forward_flops_per_token(1, causal=False) - spec.score_flops
