"""What a plan promises, to be compared with what a run measures."""

from dataclasses import dataclass
from typing import Literal

from toolkit.hardware.cluster import Cluster
from toolkit.plan.cost.memory import Memory
from toolkit.plan.cost.time import StepTime
from toolkit.units import GIB

Basis = Literal["calibrated", "data sheet", "nominal"]


@dataclass(frozen=True)
class Prediction:
    """Memory and time of one step on the fullest and the busiest rank."""

    step_time_s: float
    memory_gib: float
    """Peak of what the framework's allocator hands out (torch.cuda.max_memory_allocated)."""
    basis: Basis
    """What the step time rests on."""


def predict(memory: Memory, time: StepTime, cluster: Cluster) -> Prediction:
    """The prediction of a layout with this memory and time on `cluster`."""
    return Prediction(time.total_s, memory.allocated / GIB, basis(cluster))


def basis(cluster: Cluster) -> Basis:
    """What times on `cluster` rest on: speeds measured there, data sheets and the shares of
    them that published runs reach, or a nominal processor, which no machine is."""
    if cluster.gpu.measured is not None:
        return "calibrated"
    nominal = cluster.gpu.generation == "cpu" and cluster.gpu.fp32 is None
    return "nominal" if nominal else "data sheet"
