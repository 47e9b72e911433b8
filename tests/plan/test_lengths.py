"""Plans of stages with lengths of their own, against plans of one length in the same layout."""

import json
from typing import Any

import pytest

from tests.plan.making import LLAMA_8B, intent, recipe
from toolkit.hardware.cluster import default_cluster
from toolkit.plan.plan import Plan
from toolkit.plan.planned import Run
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import DataSection, Recipe

LAYOUT = intent(
    engine="megatron",
    tensor=4,
    pipeline=1,
    sequence=True,
    recompute="full",
    zero={"stage": 1, "offload_optimizer": "none", "offload_parameters": "none"},
)


def llama(length: int, steps: int = 100, stages: Any = ()) -> Recipe:
    data = LLAMA_8B.data.model_dump(exclude={"train"}) | {"stages": stages}
    train = {"kind": "megatron", "prefix": "tokens"}
    training = {"sequence_length": length, "steps": steps, "tokens": None}
    training |= {"micro_batch_size": 1}
    return LLAMA_8B.model_copy(
        update={
            "parallel": LAYOUT,
            "kernels": LLAMA_8B.kernels.model_copy(update={"loss": "chunked"}),
            "data": DataSection.model_validate(data | {"train": train}),
            "training": LLAMA_8B.training.model_copy(update=training),
        }
    )


STAGES = (
    {"from_step": 70, "sequence_length": 8192},
    {"from_step": 90, "sequence_length": 2048},
)


def test_a_plan_is_that_of_the_longest_length() -> None:
    """Except for what steps of the others cost, which is what a plan for them says."""
    plan = plan_recipe(llama(4096, stages=STAGES))
    alone = {length: plan_recipe(llama(length)) for length in (2048, 4096, 8192)}
    assert len({one.layout for one in (plan, *alone.values())}) == 1
    assert plan.memory_gib == alone[8192].memory_gib
    assert plan.step_time_s == alone[8192].step_time_s
    assert [one.sequence_length for one in plan.lengths] == [2048, 4096, 8192]
    for one in plan.lengths:
        single = alone[one.sequence_length]
        assert (one.flops_per_token, one.step_time_s) == (
            single.flops_per_token,
            single.step_time_s,
        )
        assert plan.flops_per_token_at(one.sequence_length) == single.flops_per_token
    times = {length: single.step_time_s or 0.0 for length, single in alone.items()}
    total = 70 * times[4096] + 20 * times[8192] + 10 * times[2048]
    found = plan.run_s(llama(4096, stages=STAGES).lengths, 100)
    assert found == pytest.approx(total, rel=1e-12)
    assert alone[4096].lengths == ()
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).lengths == plan.lengths
    run = Run(100, total / 100, default_cluster(1, 8, "h100-80gb"))
    assert run.days == pytest.approx(total / 86400)


def test_stages_behind_the_end_cost_nothing() -> None:
    plan = plan_recipe(llama(4096, steps=70, stages=STAGES))
    assert plan == plan_recipe(llama(4096, steps=70))
    assert llama(4096, steps=70, stages=STAGES).trained_lengths == (4096,)
    assert llama(4096, steps=71, stages=STAGES).trained_lengths == (4096, 8192)


def test_sequence_parallel_splits_every_length() -> None:
    """No tensor degree of 8 for a stage of 4 tokens, also where the planner chooses."""
    stages = [{"from_step": 5, "sequence_length": 4}]
    wanted = recipe(
        data__stages=stages,
        training__steps=10,
        cluster__gpus_per_node=8,
        cluster__gpu="h100-80gb",
    )
    parallel = intent(engine="megatron", tensor=4, sequence=True)
    assert plan_recipe(wanted.model_copy(update={"parallel": parallel})).layout.tp == 4
    odd = wanted.data.model_copy(
        update={"stages": (wanted.data.stages[0].model_copy(update={"sequence_length": 2}),)}
    )
    chosen = intent(engine="megatron", tensor=4, sequence="auto")
    changed = wanted.model_copy(update={"parallel": chosen, "data": odd})
    plan = plan_recipe(changed)
    assert not plan.layout.sequence_parallel
    assert any("tensor 4 does not divide 2 tokens" in reason for reason in plan.reasons)
