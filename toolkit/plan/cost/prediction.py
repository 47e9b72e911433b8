"""A plan's predictions, to be compared with a run's measurements."""

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
    """The basis of the step time."""


def predict(memory: Memory, time: StepTime, cluster: Cluster) -> Prediction:
    """The prediction of a layout with this memory and time on `cluster`."""
    return Prediction(time.total_s, memory.allocated / GIB, basis(cluster))


def basis(cluster: Cluster) -> Basis:
    """The basis of times on `cluster`: speeds measured there, data sheets and the shares of
    them that published runs reach, or a nominal CPU, which is no real machine."""
    if cluster.gpu.measured is not None:
        return "calibrated"
    nominal = cluster.gpu.generation == "cpu" and cluster.gpu.fp32 is None
    return "nominal" if nominal else "data sheet"
