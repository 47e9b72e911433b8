"""`parallel.zero.extra`: DeepSpeed's own settings in a recipe, checked like the rest."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.making import recipe
from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.errors import Problem, RecipeError
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe

TINY = Path(__file__).parents[2] / "recipes/tiny/llama-bytes.yaml"


def rendered(extra: dict[str, Any], **zero: Any) -> Any:
    wanted = recipe(parallel__engine="deepspeed", parallel__zero={**zero, "extra": extra})
    wanted = adopt_engine_config(wanted)
    return BACKENDS["deepspeed"].render(wanted, plan_recipe(wanted).layout)["zero_optimization"]


def refused(extra: dict[str, Any], **zero: Any) -> Problem:
    with pytest.raises(RecipeError) as caught:
        rendered(extra, **zero)
    (problem,) = caught.value.problems
    assert problem.key == f"parallel.zero.extra.{next(iter(extra))}"
    return problem


def test_it_replaces_the_presets_values() -> None:
    plain = rendered({}, stage=2)
    extra = {"reduce_bucket_size": 5.0e7, "overlap_comm": False, "sub_group_size": 10**6}
    assert rendered(extra, stage=2) == {**plain, **extra}
    assert type(rendered(extra)["reduce_bucket_size"]) is int, "as DeepSpeed's class has it"


@pytest.mark.parametrize(
    ("extra", "allowed", "fix"),
    [
        ({"reduce_bucket_siz": 5}, "zero_optimization", "did you mean `reduce_bucket_size`?"),
        ({"train_batch_size": 5}, "zero_optimization", "remove it"),
        ({"stage": 2}, "no key for", "write `parallel.zero.stage`"),
        (
            {"offload_optimizer": {"device": "cpu"}},
            "no key for",
            "write `parallel.zero.offload_optimizer`",
        ),
        ({"offload_param": None}, "no key for", "write `parallel.zero.offload_parameters`"),
        ({"leaf_module": {}}, "plain value", "parallel.zero.config"),
        ({"overlap_comm": "yes"}, "true or false", "remove it"),
        ({"overlap_comm": 1}, "true or false", "remove it"),
        ({"overlap_comm": "auto"}, "true or false", "remove it"),
        ({"reduce_bucket_size": "5e8"}, "an integer ≥ 1", "remove it"),
        ({"reduce_bucket_size": 0}, "an integer ≥ 1", "remove it"),
        ({"reduce_bucket_size": 1.5}, "an integer ≥ 1", "remove it"),
        ({"reduce_bucket_size": True}, "an integer ≥ 1", "remove it"),
        ({"sub_group_size": -1}, "an integer ≥ 0", "remove it"),
        ({"sub_group_size": float("inf")}, "an integer ≥ 0", "remove it"),
        ({"compute_grad_norm": False}, "true: any other value", "remove it"),
    ],
)
def test_what_is_refused(extra: dict[str, Any], allowed: str, fix: str) -> None:
    problem = refused(extra)
    assert allowed in problem.allowed and fix in problem.fix


def test_all_of_them_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        rendered({"stage": 1, "overlap_comm": 3, "no_such_key": 1})
    assert len(caught.value.problems) == 3


def test_a_file_of_ones_own_and_the_recipe_may_not_disagree(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 7}}))
    assert rendered({"reduce_bucket_size": 7}, config=str(own))["reduce_bucket_size"] == 7
    assert rendered({"sub_group_size": 9}, config=str(own))["sub_group_size"] == 9
    problem = refused({"reduce_bucket_size": 8}, config=str(own))
    assert problem.allowed == f"7, as {own}:1 has it"
    # A preset has defaults, not decisions.
    assert rendered({"reduce_bucket_size": 8}, config="zero1")["reduce_bucket_size"] == 8


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "megatron"])
def test_other_engines_refuse_it(engine: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(
            TINY,
            [f"parallel.engine={engine}", "parallel.zero.extra.overlap_comm=true"],
        )
    (problem,) = caught.value.problems
    assert problem.key == "parallel.zero.extra"
    assert "set parallel.engine to auto" in problem.fix


def test_auto_is_then_deepspeed() -> None:
    wanted = recipe(cluster__gpus_per_node=2, parallel__zero={"extra": {"overlap_comm": True}})
    assert plan_recipe(adopt_engine_config(wanted)).engine == "deepspeed"


@pytest.mark.parametrize(
    ("key", "frozen"),
    [
        ("model.freeze", {"model__freeze": ["*embed*"]}),
        ("adapter", {"adapter__rank": 4, "adapter__alpha": 8.0}),
    ],
)
def test_frozen_weights_are_not_rounded(key: str, frozen: dict[str, Any]) -> None:
    zero = {"extra": {"zero_quantized_nontrainable_weights": True}}
    wanted = recipe(parallel__engine="deepspeed", parallel__zero=zero, **frozen)
    with pytest.raises(RecipeError) as caught:
        BACKENDS["deepspeed"].render(wanted, plan_recipe(wanted).layout)
    assert [problem.key for problem in caught.value.problems] == [key]
