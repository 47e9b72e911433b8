"""Alternatives and remedies are what the planner answers; a plan gives its reasons."""

import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.making import RECIPES, on, recipe
from toolkit.errors import PlanError, RecipeError
from toolkit.intake.load import load_recipe
from toolkit.plan.alternatives import Alternative, remedies, what_if
from toolkit.plan.estimate import MARGIN
from toolkit.plan.hardware.cluster import Cluster, parse_cluster
from toolkit.plan.planner import explore, placed_on, plan_of, plan_recipe, settled
from toolkit.plan.reasons import reasons
from toolkit.plan.search import Search, search
from toolkit.recipe.schema import Recipe

SEVENTY = ("8x8xh100-80gb", "llama/llama-3.1-70b-pretrain")
CLUSTERS = ("1x1xh100-80gb", "1x2xrtx4090", "1x4xa100-40gb", "1x8xh100-80gb", "2x2xl40s")
MODELS = (
    "llama/llama-3.1-8b-pretrain",
    "llama/llama-3.1-8b-lora",
    "llama/llama-3.2-1b-sft",
    "qwen/qwen3-0.6b-dpo",
    "gpt2/gpt2-124m-pretrain",
    "qwen/qwen3-30b-a3b-pretrain",
    "tiny/mixtral-bytes",
)
STATED: dict[str, Any] = {"kernels.loss": "chunked", "parallel.zero.stage": 3}


def some_plans(count: int) -> Iterator[tuple[Recipe, Search]]:
    """Recipes on clusters, some with a setting stated."""
    source, loaded = random.Random(28), {}
    while count:
        name, cluster = source.choice(MODELS), parse_cluster(source.choice(CLUSTERS))
        if name not in loaded:
            loaded[name] = load_recipe(RECIPES / f"{name}.yaml")
        values: dict[str, Any] = {"training.global_batch_size": source.choice((4, 8))}
        if source.random() < 0.2:
            key = source.choice(sorted(STATED))
            values[key] = STATED[key]
        wanted = placed_on(loaded[name].with_values(values), cluster)
        try:
            yield wanted, explore(wanted, cluster)
        except (PlanError, RecipeError):
            continue
        count -= 1


@pytest.mark.slow
def test_each_alternative_is_what_the_planner_answers_when_asked_for_it() -> None:
    """One of each of 25 recipes on clusters, chosen at random."""
    source, changed = random.Random(7), set()
    for wanted, chosen in some_plans(25):
        one: Alternative = source.choice([*what_if(chosen)])
        answer = explore(wanted.with_values(one.changes), chosen.cluster)
        assert (one.best.memory_gib, one.best.step_s) == (
            answer.best.memory_gib, answer.best.step_s,
        )  # fmt: skip
        assert one.best.room == answer.best.room
        changed.update(one.changes)
        limit = chosen.cluster.gpu.memory_gib
        assert limit is not None
        if chosen.best.room == "fits":
            assert chosen.best.memory_gib * (1 + MARGIN) <= limit
        assert chosen.fits == (chosen.best.room != "does not fit")
    assert len(changed) > 6


def test_other_values_are_the_nearest_ones_and_auto_of_what_is_stated() -> None:
    chosen = search(*on("1x8xh100-80gb", "llama/llama-3.1-8b-pretrain", recompute="full"))
    changes = [one.changes for one in what_if(chosen)]
    assert {"parallel.engine": "fsdp"} in changes
    assert {"parallel.recompute": "auto"} in changes
    stages = [one["parallel.zero.stage"] for one in changes if "parallel.zero.stage" in one]
    assert stages and all(abs(one - chosen.best.layout.zero_stage) == 1 for one in stages)
    assert not any("parallel.virtual_pipeline" in one for one in changes), "needs a pipeline"


# Reasons


def test_a_plan_says_why_its_layout_was_chosen_and_what_is_tight() -> None:
    wanted = placed_on(load_recipe(RECIPES / f"{SEVENTY[1]}.yaml"), parse_cluster(SEVENTY[0]))
    chosen = explore(wanted)
    fastest = next(chosen.with_margin(chosen.ranked))
    gain = 1 - fastest.step_s / chosen.best.step_s
    first, *_ = reasons(chosen, 0.0)
    assert first.startswith(
        "choice: the simplest deepspeed or megatron layout that fits with a margin"
    )
    assert first.endswith(f"{gain:.1%} less time") and gain > 0
    # As large as this layout needs: it is tight, and so is all that is chosen instead.
    fixed, least = settled(wanted, plan_of(chosen)), chosen.best.memory_gib + 0.1
    tight = explore(fixed, _with_memory(chosen.cluster, least))
    assert tight.best.layout == chosen.best.layout
    assert tight.best.room == "tight"
    (warning,) = (one for one in reasons(tight, 0.0) if "WARNING" in one)
    assert "memory is tight" in warning and "no layout leaves a margin" in warning
    assert not explore(fixed, _with_memory(chosen.cluster, least - 1)).fits


def _with_memory(cluster: Cluster, memory_gib: float) -> Cluster:
    return replace(cluster, gpu=replace(cluster.gpu, memory_gib=memory_gib))


def test_what_a_chosen_value_means() -> None:
    wanted = recipe(cluster__nodes=2, cluster__gpus_per_node=2, parallel__tensor=4)
    assert any("its groups reach across" in reason for reason in plan_recipe(wanted).reasons)
    deep = search(*on("128x8xh100-80gb", "llama/llama-3.1-405b-pretrain", pipeline=16, tensor=8,
                      virtual_pipeline=1))  # fmt: skip
    assert "pipeline 16: asked for; 7 + 14 × 8 + 7 layers" in [*reasons(deep, 0.0)]


# Where nothing fits


@pytest.mark.parametrize(
    ("fixed", "change"),
    [
        (
            {"recompute": "none", "engine": "megatron", "tensor": 8, "pipeline": 4},
            "parallel.recompute",
        ),
        ({"zero": {"stage": 1}, "engine": "deepspeed", "model": "hf"}, "parallel.zero.stage"),
        ({"tensor": 1, "recompute": "none", "zero": {"stage": 1}}, "parallel.tensor"),
    ],
)
def test_a_setting_that_would_have_to_give(fixed: dict[str, Any], change: str) -> None:
    chosen = search(*on("8x8xa100-40gb", SEVENTY[1], **fixed))
    assert not chosen.fits
    found_changes = remedies(chosen)
    assert f"--set {change}=auto" in [one.options for one in found_changes]
    for one in found_changes:
        assert one.memory_gib <= 39.4


def test_what_a_run_may_do_without_is_what_the_planner_says_when_asked() -> None:
    """From the cheapest to the dearest; the recipe with these options fits as stated."""
    path = RECIPES / "llama/llama-3.1-8b-sft.yaml"
    where = {"nodes": 1, "gpus_per_node": 1, "gpu": "rtx4090"}
    here = [f"cluster.{key}={value}" for key, value in where.items()]
    chosen = explore(load_recipe(path, here))
    assert not chosen.fits
    offered = remedies(chosen)
    kinds = [one.gives_up.split(":")[0] for one in offered]
    assert kinds == ["speed", "training all weights", "4 GPUs are needed"]
    for one in offered:
        options = [*here, *shlex.split(one.options)]
        asked = explore(load_recipe(path, [word for word in options if word != "--set"]))
        assert asked.fits
        best = asked.best
        assert (best.memory_gib, best.step_s) == (one.memory_gib, one.step_s), one.gives_up
