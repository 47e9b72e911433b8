"""What one setup needs of a cluster's memory, and how fast it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from toolkit.layout import Layout, Pair
from toolkit.models.hub import model_config
from toolkit.plan.cost import terms
from toolkit.plan.cost.memory import Memory, building_gib, offloaded_bytes, peak_memory
from toolkit.plan.cost.time import StepTime, step_time
from toolkit.plan.cost.workload import Setup, Workload, workload_of
from toolkit.plan.hardware.cluster import Cluster, usual_cluster
from toolkit.plan.plan import Plan
from toolkit.plan.request import PlanRequest
from toolkit.recipe.schema import Recipe
from toolkit.text.units import GIB

MARGIN = 0.05
"""Share of a layout's predicted memory that must also be free for it to fit with a margin.
Published peaks differ from predicted ones by 0.5 to 4.0% on average, by source, and 126 of 130
rehearsed ranks need at most 5% more than predicted (docs/how-it-is-tested.md)."""
Room = Literal["fits", "tight", "does not fit"]


class Resource(NamedTuple):
    """What a layout needs of some memory. Sizes in GiB."""

    needed: float
    capacity: float
    where: str
    """`per GPU`."""


@dataclass(frozen=True)
class Estimate:
    """A layout of a workload on a cluster."""

    setup: Setup
    memory_gib: float
    """Peak of the fullest device: in training, or while the model is built."""
    host_gib: float
    """Host memory of one node for offload."""
    nvme_gib: float
    """Disk space of one node for offload."""

    @property
    def pair(self) -> Pair:
        """Engine and model implementation."""
        return self.setup.workload.pair

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.setup.layout

    @property
    def capacity_gib(self) -> float | None:
        """Memory of a device. None where it is not limited (a CPU)."""
        return self.setup.cluster.gpu.memory_gib

    @cached_property
    def memory(self) -> Memory:
        """Memory of the fullest device in training, by part."""
        return _memory(self.setup)

    @cached_property
    def time(self) -> StepTime:
        """Time of a step by part."""
        return step_time(*self.setup)

    @cached_property
    def step_s(self) -> float:
        """Time of a step."""
        return step_s(*self.setup[:3])

    def resources(self) -> Iterator[Resource]:
        """Device, host and disks. Processes without accelerators share their node's memory."""
        cluster, host = self.setup.cluster, self.host_gib
        if self.capacity_gib is None:
            host += self.memory_gib * min(cluster.gpus_per_node, self.layout.world)
        else:
            yield Resource(self.memory_gib, self.capacity_gib, "per GPU")
        yield Resource(host, cluster.host_memory_gib, "of host memory per node")
        yield Resource(self.nvme_gib, cluster.nvme_gib, "of disk per node")

    @cached_property
    def room(self) -> Room:
        """Whether it fits, with or without a margin for the error of its memory."""
        first, *others = self.resources()
        if any(needed > capacity for needed, capacity, _ in (first, *others)):
            return "does not fit"
        return "fits" if first.needed * (1 + MARGIN) <= first.capacity else "tight"

    @property
    def fits(self) -> bool:
        """Whether it fits, with or without a margin."""
        return self.room != "does not fit"


@lru_cache(maxsize=1 << 16)
def estimate(workload: Workload, layout: Layout, cluster: Cluster) -> Estimate:
    """Predict one setup. Kept, as explanations search the same layouts again."""
    setup, host, disk = Setup(workload, layout, cluster), 0.0, 0.0
    needed = max(_memory(setup).total / GIB, building_gib(workload, layout))
    if (layout.offload_optimizer, layout.offload_parameters) != ("none", "none"):
        host, disk = offloaded_bytes(workload, layout, cluster.gpus_per_node)
    return Estimate(setup, needed, host / GIB, disk / GIB)


@lru_cache(maxsize=1 << 15)
def step_s(workload: Workload, layout: Layout, cluster: Cluster) -> float:
    """Seconds of a step. Kept, as `estimate` is."""
    return step_time(workload, layout, cluster).total_s


def _memory(setup: Setup) -> Memory:
    """A CPU has no CUDA context."""
    on_device = setup.cluster.gpu.memory_gib is not None
    return peak_memory(setup.workload, setup.layout, on_device=on_device)


def estimate_plan(recipe: Recipe, plan: Plan, cluster: Cluster | None = None) -> Estimate:
    """Predict a recipe's plan on `cluster`, or on the usual machines of its accelerator."""
    where = recipe.cluster
    job = PlanRequest.of(recipe, where, model_config(recipe.model))
    place = cluster or usual_cluster(where)
    return estimate(workload_of(job, Pair(plan.engine, plan.model)), plan.layout, place)


# For programs


def derivations(found: Estimate) -> dict[str, dict[str, Any]]:
    """How the numbers of an estimate are computed, by row of `terms`."""
    of_peak = found.time.of_peak()
    if of_peak is not None:
        terms.UTILIZATION.evaluate(of_peak)
    return {
        "memory": terms.MEMORY.derivations(found.memory.symbols),
        "time": (terms.LAYER + terms.STEP).derivations(found.time.symbols),
        "utilization": terms.UTILIZATION.derivations(of_peak) if of_peak else {},
    }


def machine_output(found: Estimate) -> dict[str, Any]:
    """One estimate as `dmt plan --json` prints it."""
    return result(found, found.memory, found.memory.total) | {
        "memory_parts_gib": memory_parts(found.memory),
        "time_parts_s": found.time.parts,
        "basis": found.setup.cluster.basis,
        "host_gib_per_node": found.host_gib,
        "nvme_gib_per_node": found.nvme_gib,
        "generic": found.setup.workload.spec.generic,
        "unsupported": None,
    }


def memory_parts(memory: Memory) -> dict[str, float]:
    """Everything on the device by part, in GiB."""
    return {part: size / GIB for part, size in memory.parts.items()}


def result(found: Estimate, memory: Memory, total: float) -> dict[str, Any]:
    """Time, and memory by part under the contract's names: `total` bytes of `memory`'s rank.
    `other` is all of it that is neither a model state nor a stored activation."""
    states, activations, time = memory.model_states, memory["activations"], found.time
    parts = {
        "parameters": memory["weights"],
        "gradients": memory["gradients"],
        "optimizer": memory["optimizer"],
        "model_states": states,
        "activations": activations,
        "other": total - states - activations,
        "total": total,
    }
    return {
        "step_time_s": time.total_s,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": time.utilization(),
        "memory_gib": {part: size / GIB for part, size in parts.items()},
        "fits": found.fits,
    }
