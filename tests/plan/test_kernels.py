"""`kernels.compile`, `fused` and `experts`: what `auto` decides, why, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.making import RECIPES
from toolkit.backend import BACKENDS
from toolkit.doctor.needs import needs_of
from toolkit.errors import RecipeError
from toolkit.intake.load import load_recipe
from toolkit.models.families import model_spec
from toolkit.plan.ledger import ledger
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe, settled

LLAMA = "llama/llama-3.1-8b-pretrain"


def overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]


def planned(recipe: str, **settings: Any) -> Plan:
    return plan_recipe(load_recipe(Path(RECIPES / f"{recipe}.yaml"), overrides(settings)))


def why(plan: Plan, field: str) -> str:
    return next(one for one in plan.reasons if one.startswith(f"{field} "))


def refused(recipe: str, **settings: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        planned(recipe, **settings)
    return "; ".join(f"{one.key}: {one.found}: {one.allowed}" for one in caught.value.problems)


def test_layers_are_compiled_on_gpus() -> None:
    plan = planned(LLAMA, parallel__engine="fsdp")
    assert plan.layout.compile == "layers"
    assert why(plan, "compile") == "compile layers: auto"
    eager = planned(LLAMA, parallel__engine="fsdp", kernels__compile="none")
    assert plan.step_time_s is not None and eager.step_time_s is not None
    assert plan.step_time_s < eager.step_time_s


@pytest.mark.parametrize(
    ("recipe", "settings", "reason"),
    [
        (
            LLAMA,
            {"parallel__zero__stage": 3, "parallel__engine": "deepspeed"},
            "gathers weights",
        ),
        (LLAMA, {"cluster__gpu": "mi300x"}, "no published run shows that it pays on mi300x"),
        ("llama/llama-3.1-8b-lora", {"parallel__model": "hf"}, "no published run compiles ad"),
        ("mistral/mixtral-8x7b-pretrain", {"parallel__engine": "fsdp"}, "depends on data"),
    ],
)
def test_why_nothing_is_compiled(recipe: str, settings: dict[str, Any], reason: str) -> None:
    plan = planned(recipe, **{"parallel__model": "hf"} | settings)
    assert plan.layout.compile == "none"
    assert reason in why(plan, "compile")


def test_on_cpus() -> None:
    plan = planned("tiny/llama-bytes")
    assert plan.layout.compiles is None
    assert planned("tiny/llama-bytes", kernels__compile="layers").layout.compile == "layers"


def test_megatron_core_fuses_its_activation_function() -> None:
    plan = planned(LLAMA, parallel__engine="megatron")
    assert plan.layout.fused == "megatron"
    assert why(plan, "fused") == "fused megatron: auto"
    single = replace(plan.layout, fused="none")
    recipe = load_recipe(Path(RECIPES / f"{LLAMA}.yaml"))
    spec = model_spec(recipe.model.config or {})
    for layout, named in ((plan.layout, True), (single, False)):
        entries = ledger(recipe, replace(plan, layout=layout), spec)
        assert any(one.what == "fused SwiGLU" for one in entries) == named
    rendered = BACKENDS[plan.engine].render(recipe, plan.layout)
    assert rendered["transformer"]["bias_activation_fusion"]
    assert not BACKENDS[plan.engine].render(recipe, single)["transformer"][
        "bias_activation_fusion"
    ]
    experts = planned("mistral/mixtral-8x7b-pretrain", parallel__engine="megatron")
    assert experts.layout.fused == "none"
    assert "other numbers of tokens" in why(experts, "fused")
    gelu = planned(
        "gpt2/gpt2-124m-pretrain", parallel__engine="megatron", cluster__gpu="h100-80gb"
    )
    assert "SwiGLU only" in why(gelu, "fused")


def test_ligers_kernels_are_in_the_place_of_compiled_layers() -> None:
    asked = {"parallel__engine": "fsdp", "training__micro_batch_size": 1}
    plan = planned(LLAMA, kernels__fused="liger", **asked)
    assert (plan.layout.fused, plan.layout.compile) == ("liger", "none")
    assert "Liger's kernels are in their place" in why(plan, "compile")
    assert "asked for; planned as one kernel each" in why(plan, "fused")
    recipe = load_recipe(Path(RECIPES / f"{LLAMA}.yaml"), ["kernels.fused=liger"])
    entries = ledger(recipe, plan, model_spec(recipe.model.config or {}))
    assert any(one.what == "Liger's kernels" for one in entries)
    assert "liger-kernel" in needs_of(recipe).packages
    single = planned(LLAMA, kernels__compile="none", **asked)
    assert plan.step_time_s is not None and single.step_time_s is not None
    assert plan.step_time_s < single.step_time_s
    one = {"parallel__engine": "fsdp", "parallel__expert": 1}
    with_experts = planned(QWEN3, kernels__fused="liger", **one)
    assert with_experts.layout.fused == "liger"


def test_ligers_loss_needs_less_memory_and_no_less_time() -> None:
    asked = {
        "parallel__engine": "fsdp", "training__micro_batch_size": 1, "parallel__zero__stage": 3,
    }  # fmt: skip
    whole, chunked, fused = (
        planned(LLAMA, kernels__loss=loss, **asked) for loss in ("whole", "chunked", "liger")
    )
    assert fused.memory_gib < chunked.memory_gib < whole.memory_gib
    assert fused.step_time_s == chunked.step_time_s
    assert "asked for; planned as long as chunks" in why(fused, "loss")
    recipe = load_recipe(Path(RECIPES / f"{LLAMA}.yaml"), ["kernels.loss=liger"])
    entries = ledger(recipe, fused, model_spec(recipe.model.config or {}))
    (entry,) = (one for one in entries if one.what == "Liger's loss")
    assert entry.kind == "approximated"
    assert "liger-kernel" in needs_of(recipe).packages
    assert "changes logits" in refused(
        LLAMA, kernels__loss="liger", parallel__model="hf",
        model__config__model_type="granite", model__config__logits_scaling=8.0,
    )  # fmt: skip


QWEN3 = "qwen/qwen3-30b-a3b-pretrain"


def test_small_experts_are_grouped() -> None:
    """Whose products are shorter than what the host needs to start them."""
    megatron = {"parallel__engine": "megatron"}
    plan = planned(QWEN3, **megatron)
    assert plan.layout.experts == "grouped"
    recipe = load_recipe(Path(RECIPES / f"{QWEN3}.yaml"), overrides(megatron))
    assert BACKENDS[plan.engine].render(recipe, plan.layout)["transformer"]["moe_grouped_gemm"]
    assert plan_recipe(settled(recipe, plan)).layout == plan.layout
    single = planned(QWEN3, **megatron, kernels__experts="sequential")
    assert plan.step_time_s is not None and single.step_time_s is not None
    assert plan.step_time_s < single.step_time_s


@pytest.mark.parametrize(
    ("recipe", "settings", "reason"),
    [
        ("mistral/mixtral-8x7b-pretrain", {}, "an expert's products take 1.1 ms, longer than"),
        ("mistral/mixtral-8x7b-pretrain", {"parallel__expert": 8}, "a rank has one expert"),
        (QWEN3, {"cluster__gpu": "a100-80gb"}, "bf16 on hopper and blackwell alone"),
        (QWEN3, {"cluster__gpu": "h100-80gb", "training__precision": "fp32"}, "bf16 on hopper"),
        ("gpt-oss/gpt-oss-20b-pretrain", {}, "have biases"),
    ],
)
def test_why_experts_are_computed_in_turn(
    recipe: str, settings: dict[str, Any], reason: str
) -> None:
    plan = planned(recipe, **{"parallel__engine": "megatron"} | settings)
    assert plan.layout.experts == "sequential"
    assert reason in why(plan, "experts")


def test_stacked_experts_are_grouped() -> None:
    """In turn, gradients are written that grow with the square of the number of experts."""
    one = {"parallel__engine": "fsdp", "parallel__expert": 1, "cluster__gpu": "h100-80gb"}
    plan = planned(QWEN3, **one)
    assert plan.layout.experts == "grouped"
    single = planned(QWEN3, **one, kernels__experts="sequential")
    assert plan.step_time_s is not None and single.step_time_s is not None
    assert single.step_time_s > 2 * plan.step_time_s


def test_what_is_refused() -> None:
    layers = {"kernels__compile": "layers"}
    assert "kernels.compile: layers for engine megatron" in refused(
        LLAMA, **layers, parallel__engine="megatron"
    )
    assert "another with kernels.compile: layers" in refused(
        LLAMA,
        **layers,
        parallel__engine="deepspeed",
        parallel__model="hf",
        parallel__zero__stage=3,
    )
    assert "depends on data" in refused(
        "mistral/mixtral-8x7b-pretrain", **layers, parallel__model="hf", parallel__engine="fsdp"
    )
    assert "kernels.fused: megatron for engine fsdp" in refused(
        LLAMA, kernels__fused="megatron", parallel__engine="fsdp"
    )
    liger = {"kernels__fused": "liger"}
    for settings, why_not in (
        ({"parallel__engine": "megatron"}, "for transformers' models"),
        ({"cluster__gpu": "cpu"}, "Triton, which needs a GPU"),
        ({"kernels__loss": "liger", "kernels__fused": "auto", "cluster__gpu": "cpu"}, "Triton"),
        (layers | {"parallel__engine": "fsdp"}, "layers fuses the same operators"),
        ({"parallel__model": "hf", "model__config__hidden_act": "gelu"}, "computes silu"),
    ):
        assert why_not in refused(LLAMA, **liger | settings)
    assert "no test runs gpt2" in refused(
        "gpt2/gpt2-124m-pretrain", **liger, parallel__model="hf", cluster__gpu="h100-80gb"
    )
    assert "no grouped products for the experts of llama4_text" in refused(
        "llama/llama-4-scout-pretrain",
        kernels__experts="grouped",
        parallel__engine="fsdp",
        parallel__expert=1,
    )
    assert "the model has no experts" in refused(
        LLAMA, kernels__experts="grouped", parallel__engine="megatron"
    )
    assert "8 divides, and an expert has 764" in refused(
        QWEN3,
        kernels__experts="grouped",
        parallel__engine="megatron",
        model__config__moe_intermediate_size=764,
    )
