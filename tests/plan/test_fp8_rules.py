"""Where the planner refuses `fp8`, where it finds it a place, and what it costs."""

from pathlib import Path
from typing import Any

import pytest

from tests.plan.families import LLAMA, MIXTRAL
from tests.plan.making import RECIPES
from toolkit.doctor.needs import needs_of
from toolkit.errors import PlanError, RecipeError
from toolkit.foreign.accelerate_file import in_accelerate, refuse_kernels, render
from toolkit.intake.load import load_recipe
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.models import able_pairs, problems
from toolkit.recipe.schema import (
    ClusterSection,
    KernelsSection,
    ParallelSection,
    TrainingSection,
)

LLAMA_8B = "llama/llama-3.1-8b-pretrain"
TINY = "tiny/llama-bytes"
ON = {"kernels__fp8": "rowwise", "training__precision": "bf16"}


def planned(recipe: str, **settings: Any) -> Plan:
    changes = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return plan_recipe(load_recipe(Path(RECIPES / f"{recipe}.yaml"), changes))


def refused(recipe: str, **settings: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        planned(recipe, **settings)
    return "; ".join(
        f"{one.key}: {one.found}: {one.allowed}: {one.fix}" for one in caught.value.problems
    )


def job(config: dict[str, Any], asked: dict[str, Any]) -> PlanRequest:
    training = TrainingSection(
        steps=1, sequence_length=64, global_batch_size=48, precision="bf16"
    )
    return PlanRequest(
        ParallelSection.model_validate(asked),
        ClusterSection(gpus_per_node=4),
        training,
        config,
        kernels=KernelsSection(fp8="rowwise"),
    )


@pytest.mark.parametrize(
    ("config", "asked", "key"),
    [
        (LLAMA, {"engine": "megatron"}, "kernels.fp8"),
        (LLAMA, {"engine": "deepspeed", "zero": {"stage": 3}}, "parallel.zero.stage"),
        (MIXTRAL, {"engine": "ddp"}, "kernels.fp8"),
    ],
)
def test_where_products_are_not_in_8_bits(
    config: dict[str, Any], asked: dict[str, Any], key: str
) -> None:
    (problem,) = problems(job(config, asked))
    assert problem.key == key


def test_auto_finds_where_they_are() -> None:
    pairs = able_pairs(job(LLAMA, {}))
    assert {pair.engine for pair in pairs} == {"deepspeed"}


def test_products_in_8_bits_are_planned_faster() -> None:
    one = {"parallel__engine": "fsdp", "cluster__nodes": 1, "training__sequence_length": 8192}
    times = [planned(LLAMA_8B, **one, **on).step_time_s for on in ({}, ON)]
    assert times[1] < times[0]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kernels__fused": "liger", "parallel__model": "hf"}, "no test runs fp8 with Liger's"),
        ({"adapter": "{rank: 4, alpha: 8}"}, "kernels.fp8: rowwise with an adapter: null"),
        ({"training__precision": "fp32"}, "training.precision: fp32 with fp8: bf16 with fp8"),
        (
            {"training__sequence_length": 8184},
            "sequence_length to 8192, or set kernels.fp8 to null",
        ),
        ({"cluster__gpu": "a100-80gb"}, "with fp8, for which it has no units: a GPU from Ada"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], why: str) -> None:
    assert why in refused(LLAMA_8B, **ON | settings)


@pytest.mark.parametrize("name", ["fp8", "float8"])
def test_it_is_no_precision(name: str) -> None:
    assert "write bf16, and `kernels: {fp8: rowwise}`" in refused(
        TINY, training__precision=name
    )


def test_a_script_has_none() -> None:
    on_gpus = ["cluster.gpu=h100-80gb", "training.precision=bf16", "parallel.engine=fsdp"]
    recipe = load_recipe(RECIPES / f"{TINY}.yaml", [*on_gpus, "kernels.fp8=rowwise"])
    plan = plan_recipe(recipe)
    assert in_accelerate(recipe, plan) is not None
    assert "launch/train.py has kernels.fp8: rowwise; a script of your own" in render(
        recipe, plan
    )
    with pytest.raises(PlanError, match="fp8: rowwise") as caught:
        refuse_kernels(recipe)
    assert "--set kernels.fp8=null" in caught.value.fix


def test_what_it_needs() -> None:
    recipe = load_recipe(RECIPES / f"{TINY}.yaml", ["kernels.fp8=rowwise"])
    assert needs_of(recipe).packages["torchao"] == "kernels.fp8: rowwise"
