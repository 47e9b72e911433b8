"""The symbols of one training step's time: what every rank computes, sends and waits for.

A pipeline is as fast as its busiest stage. The others wait for it (the bubble). Closed forms
throughout (`terms.STEP`): no loop over layers or micro batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from toolkit.layout import Layout
from toolkit.plan.cost import terms
from toolkit.plan.cost.efficiency import DEFAULT, Efficiency
from toolkit.plan.cost.layer import of_micro_batch
from toolkit.plan.cost.operators import device, head_symbols, layer_symbols
from toolkit.plan.cost.stages import layers_of_stages, recomputed_of_stages
from toolkit.plan.cost.traffic import (
    data_traffic,
    layer_traffic,
    pipeline_traffic,
    update_symbols,
)
from toolkit.plan.cost.workload import Setup, Workload
from toolkit.plan.hardware.cluster import Cluster


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the busiest stage."""

    setup: Setup
    symbols: Mapping[str, float]
    """Symbols of `terms.STEP`, with the values of its rows."""

    def __getitem__(self, name: str) -> float:
        return self.symbols[name]

    @cached_property
    def parts(self) -> dict[str, float]:
        """A step by part. The parts add up to `total_s`."""
        return terms.STEP.parts(self.symbols)

    @cached_property
    def total_s(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.setup.layout.global_batch * self.setup.workload.sample_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.tokens / self.total_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second of one device."""
        return self.tokens_per_s / self.setup.layout.world

    def utilization(self) -> float | None:
        """MFU. None where the device's peak is unknown."""
        symbols = self.of_peak()
        return None if symbols is None else terms.UTILIZATION.evaluate(symbols)["utilization"]

    def of_peak(self) -> dict[str, float] | None:
        """The symbols of `terms.UTILIZATION`."""
        workload, layout, cluster, _ = self.setup
        peak = cluster.gpu.peak_flops(workload.precision)
        if peak is None:
            return None
        per_token = workload.spec.flops_per_token(workload.sequence_length, causal=True)
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
    setup = Setup(workload, layout, cluster, efficiency)
    layer = _layer(setup._replace(layout=of_micro_batch(layout)))
    each_s, head_s = layer["forward_s"] + layer["backward_s"], layer["head_s"]
    layers = workload.spec.layers, *layout.division
    recomputed = recomputed_of_stages(layout.recompute, *layers)
    stages = [
        count * each_s + again * layer["repeated_s"]
        for count, again in zip(layers_of_stages(*layers), recomputed, strict=True)
    ]
    stages[-1] += head_s
    stage = stages.index(max(stages))
    last = stage == layout.pp - 1
    share = workload.share(layout, stage)
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
        **pipeline_traffic(setup),
        **data_traffic(setup, share, forward_s, backward_s),
        **update_symbols(setup, share, layer["memory_bytes_per_s"]),
    }
    return StepTime(setup, terms.STEP.evaluate(symbols))


@lru_cache(maxsize=1 << 13)
def _layer(setup: Setup) -> Mapping[str, float]:
    """The symbols of a layer and the head."""
    workload, layout, cluster, efficiency = setup
    machine = device(cluster.gpu, workload, efficiency)
    symbols = {
        **layer_symbols(workload, layout, machine),
        **head_symbols(workload, layout, machine),
        **layer_traffic(setup),
    }
    return terms.LAYER.evaluate(symbols)
