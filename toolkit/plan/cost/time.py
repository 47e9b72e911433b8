"""The symbols of one training step's time: what every rank computes, sends and waits for.

A pipeline is as fast as its busiest stage; the others wait for it (the bubble). Closed forms
throughout (`terms.STEP`): no loop over layers or micro batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from toolkit.layout import Layout
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost import terms
from toolkit.plan.cost.collectives import network
from toolkit.plan.cost.efficiency import DEFAULT, Efficiency
from toolkit.plan.cost.layer import of_micro_batch
from toolkit.plan.cost.operators import (
    SAVED_PRODUCTS,
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
from toolkit.plan.hardware.cluster import Cluster


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the busiest stage."""

    place: PlacedLayout
    symbols: Mapping[str, float]
    """Symbols of `terms.STEP`, with the values of its rows."""

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
        """Tokens of one step."""
        return self.place.layout.global_batch * self.place.workload.sample_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.tokens / self.total_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second of one device."""
        return self.tokens_per_s / self.place.layout.world

    def utilization(self, *, recomputed: bool = False) -> float | None:
        """MFU, or HFU with what recompute repeats; None where the device's peak is unknown."""
        symbols = self.of_peak(recomputed=recomputed)
        return None if symbols is None else terms.UTILIZATION.evaluate(symbols)["utilization"]

    def of_peak(self, *, recomputed: bool = False) -> dict[str, float] | None:
        """The symbols of `terms.UTILIZATION`."""
        layout, workload = self.place.layout, self.place.workload
        peak = self.place.cluster.gpu.peak_flops(workload.precision)
        if peak is None:
            return None
        per_token = workload.spec.flops_per_token(workload.sequence_length, causal=True)
        if recomputed:
            per_token += _recomputed_flops(workload, layout)
        return {
            "tokens": self.tokens,
            "flops_per_token": per_token,
            "step_s": self.total_s,
            "gpus": layout.world,
            "peak_flops_per_s": peak,
        }


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
    layer = dict(_layer(workload, of_micro_batch(layout), cluster, efficiency))
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


@lru_cache(maxsize=1 << 13)
def _layer(
    workload: Workload, layout: Layout, cluster: Cluster, efficiency: Efficiency
) -> Mapping[str, float]:
    """The symbols of a layer and the head. In a pipeline, a stage whose layers all train is the
    slowest."""
    place = PlacedLayout(workload, layout, cluster, efficiency, network(cluster, efficiency))
    machine, part = device(cluster.gpu, workload, efficiency), place.slice
    layer = layer_time(workload, part, layout.recompute, machine)
    if layout.pp == 1:
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


def _recomputed_flops(workload: Workload, layout: Layout) -> float:
    """Forward FLOPs per token that the backward pass repeats, attention counted as masked."""
    spec, recompute = workload.spec, layout.recompute
    head = 2 * spec.vocab * spec.hidden
    weights = _weight_flops(spec)
    attention = spec.forward_flops_per_token(workload.sequence_length, causal=True) - weights
    again, products = 0.0, weights - head
    if recompute == "selective":
        by_product = workload.cost.selective == "products"
        again = (1 - SAVED_PRODUCTS) * products if by_product else attention
    elif recompute != "none":
        recomputed = recomputed_of_stages(recompute, spec.layers, *layout.division)
        again = sum(recomputed) / spec.layers * (products + attention)
    return spec.reached * again + (head if layout.loss != "whole" else 0)


def _weight_flops(spec: ModelSpec) -> float:
    """Forward FLOPs per token of everything but the scores: a sequence of one token has one
    score per head and layer, and its product with the values."""
    return spec.forward_flops_per_token(1, causal=False) - spec.score_flops
