"""A plan's predictions, to be compared with a run's measurements."""

from dataclasses import dataclass
from typing import Literal

from toolkit.hardware.cluster import Cluster
from toolkit.plan.cost.memory import Memory
from toolkit.plan.cost.time import StepTime
from toolkit.text.units import GIB

Basis = Literal["calibrated", "data sheet", "nominal"]


@dataclass(frozen=True)
class Prediction:
    """Memory and time of one step on the fullest and the busiest rank."""

    step_time_s: float
    memory_gib: float
    """Peak of what the framework's allocator hands out (torch.cuda.max_memory_allocated)."""
    basis: Basis
    """The basis of the step time."""
    reserved_gib: float | None = None
    """Peak of what the allocator takes from the device; None in a plan of an older release."""
    outside_gib: float | None = None
    """Memory of the device outside of the allocator: CUDA's context and NCCL's buffers."""


def predict(memory: Memory, time: StepTime, cluster: Cluster) -> Prediction:
    """The prediction of a layout with this memory and time on `cluster`."""
    return Prediction(
        step_time_s=time.total_s,
        memory_gib=memory.allocated / GIB,
        basis=basis(cluster),
        reserved_gib=memory.reserved / GIB,
        outside_gib=memory.context / GIB,
    )


def basis(cluster: Cluster) -> Basis:
    """The basis of times on `cluster`: speeds measured there, data sheets and the shares of
    them that published runs reach, or a nominal CPU, which is no real machine."""
    if cluster.gpu.measured is not None:
        return "calibrated"
    nominal = cluster.gpu.generation == "cpu" and cluster.gpu.fp32 is None
    return "nominal" if nominal else "data sheet"
