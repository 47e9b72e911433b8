"""Memory and step time of a fixed setup, by part."""

from dataclasses import dataclass
from typing import Any

from toolkit.layout import Pair
from toolkit.models.hub import model_config
from toolkit.plan.cost import terms
from toolkit.plan.cost.memory import Memory
from toolkit.plan.cost.time import StepTime, step_time
from toolkit.plan.cost.workload import Setup, workload_of
from toolkit.plan.hardware.cluster import Cluster, usual_cluster
from toolkit.plan.plan import Plan
from toolkit.plan.request import PlanRequest
from toolkit.plan.search import Candidate, Room, demand, device_memory, room
from toolkit.recipe.schema import Recipe
from toolkit.text.units import GIB


@dataclass(frozen=True)
class Estimate:
    """Memory of one setup, and the time of one optimizer step."""

    setup: Setup
    memory: Memory
    """Memory of the fullest rank."""
    time: StepTime
    needed: Candidate
    """On the device, in training or while the model is built, on the host and its disks."""

    @property
    def room(self) -> Room:
        """Whether it fits, with or without a margin."""
        return room(self.needed, self.setup.cluster)

    @property
    def fits(self) -> bool:
        """With or without."""
        return self.room != "does not fit"


def estimate(setup: Setup) -> Estimate:
    """Predict one setup."""
    workload, layout, cluster, _ = setup
    return Estimate(
        setup=setup,
        memory=device_memory(workload, layout, cluster),
        time=step_time(workload, layout, cluster),
        needed=demand(workload, layout, cluster),
    )


def estimate_plan(recipe: Recipe, plan: Plan, cluster: Cluster | None = None) -> Estimate:
    """Predict a recipe's plan on `cluster`, or on the usual machines of its accelerator."""
    where = recipe.cluster
    job = PlanRequest.of(recipe, where, model_config(recipe.model))
    place = cluster or usual_cluster(where)
    place = place.limited(where.memory_fraction)
    workload = workload_of(job, Pair(plan.engine, plan.model))
    return estimate(Setup(workload, plan.layout, place))


def derivations(found: Estimate) -> dict[str, dict[str, Any]]:
    """How the numbers of an estimate are computed, by part."""
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
        "host_gib_per_node": found.needed.host_gib,
        "nvme_gib_per_node": found.needed.nvme_gib,
        "generic": found.setup.workload.spec.generic,
        "unsupported": None,
    }


def memory_parts(memory: Memory) -> dict[str, float]:
    """Everything on the device by part, in GiB."""
    return {part: size / GIB for part, size in memory.parts.items()}


def result(found: Estimate, memory: Memory, total: float) -> dict[str, Any]:
    """Time, and memory by part: `total` bytes of `memory`'s rank."""
    time = found.time
    return {
        "step_time_s": time.total_s,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": time.utilization(),
        "memory_gib": _memory_gib(memory, total),
        "fits": found.fits,
    }


def _memory_gib(memory: Memory, total: float) -> dict[str, float]:
    """Memory by part in GiB under the contract's names, `total` bytes in all.

    `other` is all of `total` that is neither a model state nor a stored activation.
    """
    parts = {
        "parameters": memory["weights"],
        "gradients": memory["gradients"],
        "optimizer": memory["optimizer"],
        "model_states": memory.model_states,
        "activations": memory["activations"],
        "other": total - memory.model_states - memory["activations"],
        "total": total,
    }
    return {part: size / GIB for part, size in parts.items()}
