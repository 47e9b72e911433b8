"""Reasons and remedies: every number in them is one that can be computed again."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.making import MIXTRAL, found, llama_8b, on, recipe, tiny
from toolkit.hardware.cluster import parse_cluster
from toolkit.layout import Layout
from toolkit.plan.explain import SHOWN, Decision, decisions
from toolkit.plan.planner import plan_recipe
from toolkit.plan.remedies import over, prices, remedies
from toolkit.plan.search import Search, evaluate, search
from toolkit.recipe.schema import KernelsSection

SEVENTY = ("8x8xh100-80gb", "llama/llama-3.1-70b-pretrain")


def decided(chosen: Search) -> dict[str, Decision]:
    """By what is decided: `tensor`, `zero`, …; the pair is `engine`."""
    return {one.what.rstrip("0123456789 ").split(" true")[0]: one for one in decisions(chosen)}


def with_changes(chosen: Search, **changes: Any) -> Any:
    """The chosen layout with something else about it."""
    best, job = chosen.best, chosen.job
    layout = replace(best.layout, **changes)
    dp = layout.world // (layout.tp * layout.pp) if "dp" not in changes else layout.dp
    share = job.training.global_batch_size // dp
    layout = replace(layout, dp=dp, gradient_accumulation=share // layout.micro_batch)
    workload = job.workload(best.pair)
    return evaluate(best.pair, workload, layout, chosen.cluster)


def test_what_a_smaller_degree_needs() -> None:
    """`tensor 4: tensor 2 needs 141 GiB of 79.1`: the same layout, with tensor groups of 2."""
    chosen = found(*SEVENTY)
    best = chosen.best.layout
    assert best.tp == 4
    (two,) = (one for one in decided(chosen)["tensor"].alternatives if one[7] == "2")
    told = re.match(r"tensor 2 needs (\d+) GiB of 79\.1 \(or is (\d+)% slower with (.*)\)", two)
    assert told is not None
    alone = with_changes(chosen, tp=2, dp=2 * best.dp)
    assert round(alone.memory_gib) == int(told[1])
    fastest = next(
        one for one in chosen.fitting if one.layout.tp == 2 and one.pair == alone.pair
    )
    slower = fastest.step_s / chosen.best.step_s - 1  # type: ignore[operator]
    assert round(100 * slower) == int(told[2])
    for change in told[3].split(", "):
        field, value = change.rsplit(" ", 1)
        name = {"pipeline": "pp", "zero": "zero_stage", "micro batch": "micro_batch"}.get(field)
        assert name is None or getattr(fastest.layout, name) == int(value)


def test_what_recompute_and_zero_cost_alone() -> None:
    chosen = found(*SEVENTY)
    recompute, zero = decided(chosen)["recompute none"], decided(chosen)["zero"]
    (full,) = (one for one in recompute.alternatives if "full" in one)
    time = with_changes(chosen, recompute="full").step_s
    percent = re.fullmatch(r"recompute full is (\d+)% slower", full)
    assert percent is not None
    assert round(100 * (time / chosen.best.step_s - 1)) == int(percent[1])
    need = re.match(r"zero 0 needs (\d+) GiB of 79\.1", zero.alternatives[0])
    assert need is not None
    assert round(with_changes(chosen, zero_stage=0).memory_gib) == int(need[1])


def test_what_a_change_brings_with_it_is_not_told() -> None:
    """Without pipeline stages there are no virtual ones, without tensor ranks no sequence
    parallel."""
    chosen = search(*on("16x8xh100-80gb", "mistral/mixtral-8x7b-pretrain", expert=8))
    by_name = decided(chosen)
    (no_pipeline,) = (one for one in by_name["pipeline"].alternatives if one.split()[1] == "1")
    assert "with" in no_pipeline and "virtual" not in no_pipeline
    (no_tensor,) = (one for one in by_name["tensor"].alternatives if one.split()[1] == "1")
    assert "with" in no_tensor and "sequence" not in no_tensor


def test_another_engine() -> None:
    chosen = found(*SEVENTY)
    alternatives = decisions(chosen)[0].alternatives
    fastest = next(one for one in chosen.fitting if one.pair.model == "hf")
    slower = round(100 * (fastest.step_s / chosen.best.step_s - 1))  # type: ignore[operator]
    assert any(
        one.startswith(f"engine deepspeed with model hf is {slower}% slower (with zero 3")
        for one in alternatives
    )
    assert any(re.match(r"engine ddp with model hf needs \d+ GiB", one) for one in alternatives)


def test_what_is_asked_for_is_not_argued_about() -> None:
    reasons = llama_8b(engine="megatron", model="megatron", tensor=2, recompute="full").reasons
    assert reasons[0] == "engine megatron with model megatron: asked for"
    assert "tensor 2: asked for" in reasons
    assert "recompute full: asked for" in reasons


def test_a_reason_names_the_nearest_alternatives() -> None:
    tensor = decided(found(*SEVENTY))["tensor"]
    assert len(tensor.alternatives) == 3
    assert tensor.reason == "; ".join(
        (f"{tensor.what}: {tensor.why}", *tensor.alternatives[:SHOWN])
    )
    assert "tensor 2" in tensor.alternatives[0] and "tensor 1" in tensor.alternatives[2]


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
    assert away.why == "auto; nothing fits without"
    fsdp = decided(tiny(2, engine="fsdp", zero={"offload_optimizer": "cpu"}))
    why = fsdp["offload of parameters cpu"].why
    assert why.endswith("; the engine moves optimizer and parameters together")


# Where nothing fits


def test_how_far_off() -> None:
    chosen = search(*on("1x8xh100-80gb", SEVENTY[1], engine="megatron"))
    assert not chosen.fits
    smallest = min(one.memory_gib for one in chosen.too_large)
    text = f"{smallest:.1f} of 79.1 GiB per GPU, {smallest - 79.1:.1f} GiB too much"
    assert text in over(chosen)


@pytest.mark.parametrize(
    ("fixed", "change"),
    [
        (
            {"recompute": "none", "engine": "megatron", "tensor": 8, "pipeline": 4},
            "set parallel.recompute to auto",
        ),
        ({"zero": {"stage": 1}, "engine": "deepspeed", "model": "hf"}, "parallel.zero.stage"),
        ({"tensor": 1, "recompute": "none", "zero": {"stage": 1}}, "parallel.tensor"),
    ],
)
def test_a_setting_that_would_have_to_give(fixed: dict[str, Any], change: str) -> None:
    chosen = search(*on("8x8xa100-40gb", SEVENTY[1], **fixed))
    assert not chosen.fits
    found_changes = remedies(chosen)
    assert any(change in one.change for one in found_changes)
    for one in found_changes:
        assert one.best.memory_gib <= 40
        assert f"{one.best.memory_gib:.1f} of 39.4 GiB" in str(one)


def test_a_smaller_micro_batch() -> None:
    job, cluster = on("8x8xh100-80gb", SEVENTY[1], engine="megatron", tensor=8, pipeline=2)
    large = replace(job, training=job.training.model_copy(update={"micro_batch_size": 32}))
    chosen = search(large, cluster)
    assert not chosen.fits
    first = remedies(chosen)[0]
    assert first.change == "set training.micro_batch_size to auto"
    assert first.best.layout.micro_batch < 32


def test_more_gpus() -> None:
    fixed = {"engine": "megatron", "pipeline": 1}
    chosen = search(*on("1x4xh100-80gb", "llama/llama-3.1-8b-pretrain", **fixed, tensor=1))
    assert chosen.best.layout.loss == "chunked"
    job = replace(chosen.job, kernels=KernelsSection(loss="whole"))
    chosen = search(job, chosen.cluster)
    assert not chosen.fits
    assert remedies(chosen)[0].change == "set kernels.loss to auto"
    more = remedies(chosen)[-1]
    assert re.fullmatch(r"use (\d+) GPUs \(1 node of \1\)", more.change)
    assert more.cluster.gpus_per_node == 8
    job, cluster = on("1x8xh100-80gb", "llama/llama-3.1-8b-pretrain", **fixed, tensor=1)
    assert search(replace(job, kernels=KernelsSection(loss="whole")), cluster).best == more.best


def test_a_plan_that_does_not_fit_says_so_and_how_it_would() -> None:
    plan = llama_8b(1, engine="megatron")
    assert not plan.fits
    warnings = [reason for reason in plan.reasons if "WARNING" in reason]
    assert len(warnings) == 1 and "GiB too much" in warnings[0]
    assert plan.remedies
    assert plan.reasons[-len(plan.remedies) :] == tuple(
        f"would fit: {change}" for change in plan.remedies
    )


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
