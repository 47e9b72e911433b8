"""What a fixed setup needs and how fast it is: memory and step time by part.

For recipes, and for lists of published cases in the form that `dmt estimate --cases` reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import PlanError
from toolkit.hardware.catalogue import GPUS
from toolkit.plan.formulas import StateCounts, deepspeed_estimator, zero_paper
from toolkit.plan.memory import GIB, Memory, peak_memory
from toolkit.plan.published import Case, Setup
from toolkit.plan.time import StepTime, step_time


@dataclass(frozen=True)
class Estimate:
    """Memory of the fullest rank and time of one optimizer step."""

    memory: Memory
    time: StepTime
    fits: bool


def estimate(setup: Setup) -> Estimate:
    """Predict one setup."""
    memory = peak_memory(setup.workload, setup.layout)
    return Estimate(
        memory,
        step_time(setup.workload, setup.layout, setup.cluster),
        memory.fits(setup.cluster.gpu.memory_gib),
    )


def estimate_case(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one published case: DESIGN.md's contract of `dmt estimate --cases`."""
    case = Case(fields)
    try:
        answer = _predicted(case) if case.has_shape else _counted(case)
    except PlanError as error:
        answer = {"unsupported": str(error)}
    return _EMPTY | {"id": fields["id"]} | answer


_EMPTY: dict[str, Any] = {
    "id": None,
    "step_time_s": None,
    "tokens_per_s_per_gpu": None,
    "mfu": None,
    "memory_gib": {},
    "fits": None,
    "unsupported": None,
}


def _predicted(case: Case) -> dict[str, Any]:
    """Memory and time of a model whose shape is known."""
    setup = case.setup()
    found = estimate(setup)
    # What an engine's own log reports: Megatron allocated, torchtitan reserved memory.
    memory = found.memory
    total = memory.reserved if setup.workload.engine == "fsdp" else memory.allocated
    return {
        "step_time_s": found.time.total_s,
        "tokens_per_s_per_gpu": found.time.tokens_per_s_per_gpu,
        "mfu": found.time.mfu_causal,
        "memory_gib": memory_gib(memory) | {"total": total / GIB},
        "fits": found.fits,
    }


def memory_gib(memory: Memory) -> dict[str, float]:
    """Memory by part in GiB, under the contract's names and the finer ones."""
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "model_states": memory.model_states,
        "activations": memory.activations,
        "other": memory.total - memory.model_states - memory.activations,
        "logits": memory.logits,
        "workspace": memory.workspace,
        "buffers": memory.buffers,
        "reserve": memory.reserve,
        "context": memory.context,
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "total": memory.total,
    }
    return {part: size / GIB for part, size in parts.items()}


def _counted(case: Case) -> dict[str, Any]:
    """Model states of a model of which only the number of parameters is known.

    Where the largest layer is stated, by the formulas of DeepSpeed's estimator, else by
    those of the ZeRO paper. What activations need is unknown, so nothing is known to fit.
    """
    if case.parameters is None:
        raise PlanError(
            "model: neither its shape nor its number of parameters is stated",
            fix="state layers, hidden, heads and seq, or params",
        )
    query = case.estimator_query
    if query is not None:
        states = deepspeed_estimator(query)
    else:
        states = zero_paper(case.parameters, case.zero_stage, case.data_parallel)
    capacity = None if case.gpu is None else GPUS[case.gpu].memory_gib
    too_large = capacity is not None and states.total > capacity * GIB
    return {"memory_gib": _counted_gib(states), "fits": False if too_large else None}


def _counted_gib(states: StateCounts) -> dict[str, float | None]:
    return {
        "parameters": states.parameters / GIB,
        "gradients": states.gradients / GIB,
        "optimizer": states.optimizer / GIB,
        "model_states": states.total / GIB,
        "activations": None,
        "other": None,
        "total": None,
        "host_per_node": states.host_per_node / GIB,
    }
