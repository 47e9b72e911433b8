"""`dmt estimate --cases`: predictions of published cases."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import PlanError
from toolkit.extras.published.case import Case
from toolkit.extras.published.formulas import StateCounts, deepspeed_estimator, zero_paper
from toolkit.hardware.catalogue import GPUS
from toolkit.plan.cost.memory import stage_memory
from toolkit.plan.estimate import estimate, result
from toolkit.text.terminal import tell
from toolkit.text.units import GIB


def estimate_cases(cases: Path, out: Path, overrides: list[str]) -> None:
    """Predict every case of a file; those that cannot be predicted state why."""
    if overrides:
        raise PlanError("--set: changes a recipe, and --cases has none", fix="leave it out")
    try:
        listed = json.loads(cases.read_text(encoding="utf-8"))
        if not isinstance(listed, list) or not all(isinstance(case, dict) for case in listed):
            raise ValueError("it holds something else")
        results = [estimate_case(case) for case in listed]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(
            f"--cases: {cases} is not a list of cases: {type(error).__name__}: {error}",
            fix="see docs/estimate.md for the fields of a case",
        ) from error
    try:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--out: cannot write {out}: {error}", fix="name a file") from error
    refused = sum(1 for result in results if result["unsupported"])
    tell(f"{len(results) - refused} of {len(results)} cases answered in {out}")


def estimate_case(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one published case, as `dmt estimate --cases` prints it."""
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
    """Memory and time of a model whose shape is known.

    Memory is what the engine's own log shows, because that is what sources publish:
    torchtitan the reserved memory of the worst rank, Megatron-LM the allocated memory of the
    last rank only (which writes its TensorBoard). Whether it fits is decided by the total of
    the fullest rank.
    """
    setup = case.setup()
    found = estimate(setup)
    memory, total = found.memory, found.memory.reserved
    if case.by_megatron:
        if case.logs_last_rank:
            memory = stage_memory(setup.workload, setup.layout, setup.layout.pp - 1)
        total = memory.allocated
    return result(found, memory, total)


def _counted(case: Case) -> dict[str, Any]:
    """Model states of a model known only by its number of parameters.

    If the largest layer is stated, by the formulas of DeepSpeed's estimator, otherwise by those
    of the ZeRO paper. The memory of activations is unknown, so whether it fits is unknown, too.
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
