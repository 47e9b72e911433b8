"""Where DeepSpeed's optimizer states of today can be, and what they cost and change."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import Problem
from toolkit.features.bf16_states import Bf16StateKeys
from toolkit.layout import Pair
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.workload import Workload
from toolkit.plan.plan import Plan
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.legality import table
from toolkit.recipe.schema import ParallelSection

_BF16_STATES = "parallel.zero.bf16_optimizer_states"
BF16_STATE_BYTES = 6.0
"""The weight that is updated and two moments (zero/stage_1_and_2.py and stage3.py,
`master_weights_and_grads_dtype`; cpu_adam.py, `state_dtype`)."""


def intent(
    keys: Bf16StateKeys, parallel: ParallelSection, pair: Pair | None, ranks: int | None
) -> Iterator[Problem]:
    """Stages whose optimizer reads the setting.

    Stage 1 without offload has another one, `BF16_Optimizer`, which ignores it, and states on
    NVMe are swapped in fp32.
    """
    if not keys.bf16_optimizer_states or ranks is not None:
        return
    stage, place = parallel.zero.stage, parallel.zero.offload_optimizer
    found, allowed = "", ""
    if pair is not None:
        if not table()[pair].zero_config:
            found, allowed = f"true for {pair}", "null or false: only DeepSpeed has it"
    elif place == "nvme":
        found, allowed = f"true with offload_optimizer: {place}", "false, or none or cpu there"
    elif stage == 0 or (stage == 1 and place == "none"):
        found = f"true with stage: {stage} and offload_optimizer: {place}"
        allowed = "stage 2 or 3, or stage 1 with offload_optimizer: cpu"
    if found:
        yield Problem(_BF16_STATES, found, allowed, f"remove {_BF16_STATES}")


def refusals(job: PlanRequest, _pair: Pair) -> Iterator[Problem]:
    """AdamW in bf16 alone."""
    keys, found = job.features["bf16_states"], ""
    assert isinstance(keys, Bf16StateKeys)
    if job.training.precision != "bf16":
        found = f"training.precision: {job.training.precision}"
    elif job.optimizer.kind.whole is not None:
        found = f"optimizer.name: {job.optimizer.name}"
    if keys.bf16_optimizer_states and found:
        allowed = "true only with training.precision: bf16 and optimizer.name: adamw"
        yield Problem(_BF16_STATES, f"true with {found}", allowed, f"remove {_BF16_STATES}")


def workload(plain: Workload, keys: Bf16StateKeys) -> Workload:
    """Fewer bytes; the update is planned as long as with fp32 states: nobody measured it."""
    if not keys.bf16_optimizer_states:
        return plain
    return replace(plain, optimizer_bytes=BF16_STATE_BYTES)


def ledger(
    keys: Bf16StateKeys, _plan: Plan, _spec: ModelSpec, _config: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """bf16 has 8 significant bits."""
    if keys.bf16_optimizer_states:
        yield (
            "approximated",
            "bf16",
            "computed in bf16, and weights and moments are updated in it: a change of a weight "
            "by less than 1/512 may be lost",
        )


def rehearsed(_keys: Bf16StateKeys) -> Bf16StateKeys:
    """Off: rehearsals are in fp32."""
    return Bf16StateKeys()
