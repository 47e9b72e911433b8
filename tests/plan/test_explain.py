"""Reasons and remedies: what is said of another layout is what the planner answers."""

import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.formulas import check
from tests.plan.making import MIXTRAL, RECIPES, found, llama_8b, on, recipe, tiny
from toolkit.errors import PlanError, RecipeError
from toolkit.hardware.cluster import parse_cluster
from toolkit.intake.load import load_recipe
from toolkit.layout import Layout
from toolkit.plan.dimensions import DIMENSION, IN_REASONS
from toolkit.plan.estimate import Setup, estimate
from toolkit.plan.explain import Decision, choice, decision, decisions, what_if
from toolkit.plan.plan import Plan
from toolkit.plan.planner import explore, placed_on, plan_of, plan_recipe, settled
from toolkit.plan.remedies import over, prices, remedies
from toolkit.plan.search import MARGIN, Search, room, search
from toolkit.plan.workloads import workload_of
from toolkit.recipe.schema import KernelsSection, Recipe

SEVENTY = ("8x8xh100-80gb", "llama/llama-3.1-70b-pretrain")


def decided(chosen: Search) -> dict[str, Decision]:
    """By what is decided: `tensor`, `zero`, …; the pair is `engine`."""
    return {one.what.rstrip("0123456789 ").split(" true")[0]: one for one in decisions(chosen)}


CLUSTERS = ("1x1xh100-80gb", "1x2xrtx4090", "1x4xa100-40gb", "1x8xh100-80gb", "2x2xl40s")
MODELS = (
    "llama/llama-3.1-8b-pretrain",
    "llama/llama-3.1-8b-lora",
    "llama/llama-3.2-1b-sft",
    "qwen/qwen3-0.6b-dpo",
    "gpt2/gpt2-124m-pretrain",
    "mistral/mistral-7b-sft",
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


def asked(wanted: Recipe, chosen: Search, values: dict[str, Any]) -> Search:
    """What the planner says to the same recipe with these values."""
    return explore(wanted.with_values(values), chosen.cluster)


@pytest.mark.slow
def test_each_alternative_is_what_the_planner_answers_when_asked_for_it() -> None:
    """One of each of 200 recipes on clusters, chosen at random."""
    source, changed = random.Random(7), set()
    for wanted, chosen in some_plans(200):
        job, best = chosen.job, chosen.best
        check(estimate(Setup(workload_of(job, best.pair), best.layout, chosen.cluster)))
        one = next(what_if(chosen, source.sample(IN_REASONS, len(IN_REASONS))), None)
        if one is not None:
            answer = asked(wanted, chosen, {one.setting: one.value})
            assert (one.best.memory_gib, one.best.step_s, room(one.best, chosen.cluster)) == (
                answer.best.memory_gib, answer.best.step_s, room(answer.best, answer.cluster),
            )  # fmt: skip
            changed.add(one.setting)
        limit = chosen.cluster.gpu.memory_gib
        assert limit is not None
        if room(chosen.best, chosen.cluster) == "fits":
            assert chosen.best.memory_gib * (1 + MARGIN) <= limit
        assert chosen.fits == (room(chosen.best, chosen.cluster) != "does not fit")
    assert len(changed) > 6


def test_context_and_tensor_parallel_by_what_a_rank_receives() -> None:
    wanted = load_recipe(RECIPES / "llama/llama-3.1-8b-pretrain-128k.yaml")
    fewer = {"training.global_batch_size": 8, "parallel.engine": "megatron"}
    wanted = placed_on(wanted.with_values(fewer), parse_cluster("2x8xh100-80gb"))
    chosen = explore(wanted)
    degree, exchange = (decision(chosen, DIMENSION[one]) for one in ("cp", "exchange"))
    assert "MiB per layer and pass, with tensor 16 instead 3,840 MiB" in degree.why
    assert "MiB of keys and values per layer and rank" in exchange.why
    short = explore(wanted.with_values({"training.sequence_length": 8192}))
    assert short.best.layout.cp == 1
    assert "only if nothing fits otherwise" in decision(short, DIMENSION["cp"]).why


def test_a_plan_says_why_a_layout_was_chosen_and_how_much_memory_is_free() -> None:
    where = parse_cluster("4x8xh100-80gb")
    wanted = placed_on(load_recipe(RECIPES / f"{SEVENTY[1]}.yaml"), where)
    chosen = explore(wanted)
    how, memory, passed_over = choice(chosen)
    equal = chosen.equal
    assert chosen.best != equal[0]
    faster = 1 - equal[0].step_s / chosen.best.step_s  # type: ignore[operator]
    assert how.startswith(f"choice: the simplest of {len(equal)} layouts whose predicted")
    assert how.endswith(f": {faster:.1%} faster")
    assert f"memory: {chosen.best.memory_gib:.1f} of 79.1 GiB leaves more than" in memory
    assert "needs 76.9 GiB and leaves no such margin" in passed_over
    # As large as this layout needs: it is tight, and so is all that is chosen instead.
    share = (chosen.best.memory_gib + 0.1) / 79.1
    fixed = settled(wanted, plan_of(chosen)).with_values({"cluster.memory_fraction": share})
    tight = explore(fixed)
    assert tight.best.layout == chosen.best.layout
    assert room(tight.best, tight.cluster) == "tight"
    assert "memory: WARNING: tight: " in list(choice(tight))[-1]
    assert "no layout leaves a margin" in list(choice(tight))[-1]
    assert explore(fixed, tight.cluster).cluster == tight.cluster, "the share is taken once"
    too_small = fixed.with_values({"cluster.memory_fraction": share - 0.01})
    assert not explore(too_small).fits


def test_the_shortlist_has_a_safer_layout() -> None:
    where = parse_cluster("1x8xh100-80gb")
    path = RECIPES / "qwen/qwen3-30b-a3b-pretrain.yaml"
    chosen = explore(placed_on(load_recipe(path, [], where), where))
    assert room(chosen.best, chosen.cluster) == "tight"
    for most in (1, 2, 5):
        shown = chosen.shortlist(most)
        assert shown[0] is chosen.best or most == 1
        assert [room(one, chosen.cluster) for one in shown].count("fits") == 1
        assert len(shown) <= max(2, most)


def test_what_is_asked_for_is_not_argued_about() -> None:
    reasons = llama_8b(engine="megatron", model="megatron", tensor=2, recompute="full").reasons
    assert "engine megatron with model megatron: asked for" in reasons
    assert "tensor 2: asked for" in reasons
    assert "recompute full: asked for" in reasons


def test_notes() -> None:
    """What the chosen value means is said beside it."""
    odd = [one.reason for one in decisions(tiny(2, tensor=2, length=63))]
    assert any("tensor 2 does not divide 63 tokens" in reason for reason in odd)
    wanted = recipe(cluster__nodes=2, cluster__gpus_per_node=2, parallel__tensor=4)
    assert any("WARNING: its groups reach" in reason for reason in plan_recipe(wanted).reasons)
    experts = recipe(
        model__config=MIXTRAL, cluster__gpus_per_node=4, parallel__expert=2, parallel__tensor=2
    )
    assert "expert 2: asked for; 2 experts per rank" in plan_recipe(experts).reasons
    deep = on("128x8xh100-80gb", "llama/llama-3.1-405b-pretrain", pipeline=16, tensor=8,
              virtual_pipeline=1)  # fmt: skip
    pipeline = decided(search(*deep))["pipeline"].reason
    assert pipeline == "pipeline 16: asked for; 7 + 14 × 8 + 7 layers"
    micro = decided(search(*deep))["micro batch"].why
    accumulation = search(*deep).best.layout.gradient_accumulation
    assert f"idles for {15 / accumulation:.0%} of the time" in micro
    away = decided(found("1x8xh100-80gb", SEVENTY[1]))["offload of the optimizer cpu"]
    assert away.why == "auto; without it nothing is as fast with a margin of memory"
    fsdp = decided(tiny(2, engine="fsdp", zero={"offload_optimizer": "cpu"}))
    why = fsdp["offload of parameters cpu"].why
    assert why.endswith("; the engine moves optimizer and parameters together")


# Where nothing fits


def test_how_far_off() -> None:
    chosen = search(*on("1x8xh100-80gb", SEVENTY[1], engine="megatron"))
    assert not chosen.fits
    smallest = min(one.smallest.memory_gib for one in chosen.splits)
    text = f"{smallest:.1f} of 79.1 GiB per GPU, {smallest - 79.1:.1f} GiB too much"
    assert text in over(chosen)


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


def test_a_smaller_micro_batch() -> None:
    job, cluster = on("8x8xh100-80gb", SEVENTY[1], engine="megatron", tensor=8, pipeline=2)
    large = replace(job, training=job.training.model_copy(update={"micro_batch_size": 32}))
    chosen = search(large, cluster)
    assert not chosen.fits
    first = remedies(chosen)[0]
    assert first.options == "--set training.micro_batch_size=auto"
    assert first.memory_gib <= 79.1 < chosen.best.memory_gib


def test_more_gpus() -> None:
    fixed = {"engine": "megatron", "pipeline": 1}
    chosen = search(*on("1x4xh100-80gb", "llama/llama-3.1-8b-pretrain", **fixed, tensor=1))
    assert chosen.best.layout.loss == "chunked"
    job = replace(chosen.job, kernels=KernelsSection(loss="whole"))
    chosen = search(job, chosen.cluster)
    assert not chosen.fits
    assert remedies(chosen)[0].options == "--set kernels.loss=auto"
    more = remedies(chosen)[-1]
    assert more.options == "--set cluster.nodes=1 --set cluster.gpus_per_node=8"
    job, cluster = on("1x8xh100-80gb", "llama/llama-3.1-8b-pretrain", **fixed, tensor=1)
    best = search(replace(job, kernels=KernelsSection(loss="whole")), cluster).best
    assert (best.memory_gib, best.step_s) == (more.memory_gib, more.step_s)


def test_a_plan_that_does_not_fit_says_so_and_how_it_would() -> None:
    plan = llama_8b(1, engine="megatron")
    assert not plan.fits
    warnings = [reason for reason in plan.reasons if "WARNING" in reason]
    assert len(warnings) == 1 and "GiB too much" in warnings[0]
    assert plan.remedies
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_what_fixed_settings_cost() -> None:
    fixed = search(*on(*SEVENTY, tensor=1))
    free = found(*SEVENTY)
    (price,) = (one for one in prices(fixed) if one.startswith("parallel.tensor is 1"))
    shorter = 1 - free.best.step_s / fixed.best.step_s  # type: ignore[operator]
    assert f"would be {shorter:.1%} shorter" in price
    assert list(prices(free)) == []


def test_a_layout_of_a_cpu_is_explained_at_nominal_speeds() -> None:
    reasons = [one.reason for one in decisions(tiny(2))]
    assert any("at nominal CPU speeds" in reason for reason in reasons)
    assert parse_cluster("1x2xcpu").gpu.memory_gib is None
    assert tiny(2).best.layout.world == Layout(dp=2).world
