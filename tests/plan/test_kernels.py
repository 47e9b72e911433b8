"""`kernels.compile`, `fused`, `experts`, `loss` and `fp8`: what `auto` decides, why, what they
gain, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.making import RECIPES
from toolkit.backend import BACKENDS
from toolkit.doctor.needs import needs_of
from toolkit.errors import PlanError, RecipeError
from toolkit.foreign.accelerate_file import in_accelerate, refuse_kernels, render
from toolkit.intake.load import load_recipe
from toolkit.models.families import model_spec
from toolkit.plan.ledger import ledger
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe, settled
from toolkit.recipe.schema import Recipe

LLAMA = "llama/llama-3.1-8b-pretrain"
MIXTRAL = "mistral/mixtral-8x7b-pretrain"
QWEN3 = "qwen/qwen3-30b-a3b-pretrain"
TINY = "tiny/llama-bytes"
FSDP = {"parallel__engine": "fsdp"}
MEGATRON = {"parallel__engine": "megatron"}
HF = {"parallel__model": "hf"}
LAYERS = {"kernels__compile": "layers"}
LIGER = {"kernels__fused": "liger"}
GROUPED = {"kernels__experts": "grouped"}
FP8 = {"kernels__fp8": "rowwise", "training__precision": "bf16"}
ONE_EXPERT_GROUP = FSDP | {"parallel__expert": 1, "cluster__gpu": "h100-80gb"}


def loaded(name: str, **settings: Any) -> Recipe:
    changes = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return load_recipe(RECIPES / f"{name}.yaml", changes)


def planned(name: str, **settings: Any) -> Plan:
    return plan_recipe(loaded(name, **settings))


@pytest.mark.parametrize(
    ("name", "settings", "field", "value", "reason"),
    [
        (LLAMA, FSDP, "compile", "layers", "auto"),
        (
            LLAMA,
            {"parallel__zero__stage": 3, "parallel__engine": "deepspeed"},
            "compile",
            "none",
            "gathers weights",
        ),
        (LLAMA, HF | {"cluster__gpu": "mi300x"}, "compile", "none", "pays on mi300x"),
        ("llama/llama-3.1-8b-lora", HF, "compile", "none", "no published run compiles ad"),
        (MIXTRAL, FSDP, "compile", "none", "depends on data"),
        (TINY, {}, "compile", "none", ""),
        (TINY, LAYERS, "compile", "layers", "asked for"),
        (LLAMA, MEGATRON, "fused", "megatron", "auto"),
        (MIXTRAL, MEGATRON, "fused", "none", "other numbers of tokens"),
        (
            "gpt2/gpt2-124m-pretrain",
            MEGATRON | {"cluster__gpu": "h100-80gb"},
            "fused",
            "none",
            "SwiGLU only",
        ),
        (LLAMA, FSDP | LIGER, "fused", "liger", "asked for; planned as one kernel each"),
        (LLAMA, FSDP | LIGER, "compile", "none", "Liger's kernels are in their place"),
        (QWEN3, ONE_EXPERT_GROUP | LIGER, "fused", "liger", "asked for"),
        (LLAMA, FSDP | {"kernels__loss": "liger"}, "loss", "liger", "planned as long as chu"),
        (QWEN3, MEGATRON, "experts", "grouped", "auto"),
        (QWEN3, ONE_EXPERT_GROUP, "experts", "grouped", "auto"),
        (MIXTRAL, MEGATRON, "experts", "sequential", "take 1.1 ms, longer than"),
        (
            MIXTRAL,
            MEGATRON | {"parallel__expert": 8},
            "experts",
            "sequential",
            "a rank has one expert",
        ),
        (
            QWEN3,
            MEGATRON | {"cluster__gpu": "a100-80gb"},
            "experts",
            "sequential",
            "bf16 on hopper and blackwell alone",
        ),
        (
            QWEN3,
            MEGATRON | {"training__precision": "fp32"},
            "experts",
            "sequential",
            "bf16 on hopper",
        ),
        ("gpt-oss/gpt-oss-20b-pretrain", MEGATRON, "experts", "sequential", "have biases"),
    ],
)
def test_what_is_decided_and_why(
    name: str, settings: dict[str, Any], field: str, value: str, reason: str
) -> None:
    plan = planned(name, **settings)
    assert getattr(plan.layout, field) == value
    told = [one for one in plan.reasons if one.startswith(f"{field} {value}: ")]
    assert reason in "".join(told) and (told or not reason)


@pytest.mark.parametrize(
    ("name", "settings", "better", "worse", "factor"),
    [
        (LLAMA, FSDP, {}, {"kernels__compile": "none"}, 1),
        (LLAMA, FSDP | {"kernels__compile": "none"}, LIGER, {}, 1),
        (QWEN3, MEGATRON, {}, {"kernels__experts": "sequential"}, 1),
        # In turn, gradients are written that grow with the square of the number of experts.
        (QWEN3, ONE_EXPERT_GROUP, {}, {"kernels__experts": "sequential"}, 2),
        (
            LLAMA,
            FSDP | {"cluster__nodes": 1, "training__sequence_length": 8192},
            FP8,
            {},
            1,
        ),
    ],
)
def test_what_is_faster(
    name: str,
    settings: dict[str, Any],
    better: dict[str, Any],
    worse: dict[str, Any],
    factor: float,
) -> None:
    fast, slow = (planned(name, **settings | one) for one in (better, worse))
    assert fast.step_time_s is not None and slow.step_time_s is not None
    assert slow.step_time_s > factor * fast.step_time_s


@pytest.mark.parametrize(
    ("settings", "field", "entry"),
    [
        (MEGATRON, "fused", "fused SwiGLU"),
        (FSDP | LIGER, "fused", "Liger's kernels"),
        (FSDP | {"kernels__loss": "liger"}, "loss", "Liger's loss"),
        (FSDP, "compile", "compiled layers"),
    ],
)
def test_the_ledger_and_the_packages_follow_the_layout(
    settings: dict[str, Any], field: str, entry: str
) -> None:
    recipe = loaded(LLAMA, **settings)
    plan, spec = plan_recipe(recipe), model_spec(recipe.model.config or {})
    without = replace(plan, layout=replace(plan.layout, **{field: "none"}))
    for one, named in ((plan, True), (without, False)):
        found = [each for each in ledger(recipe, one, spec) if each.what == entry]
        assert len(found) == named
    assert ("liger-kernel" in needs_of(recipe).packages) == ("Liger" in entry)


def test_engines_are_told() -> None:
    recipe = loaded(LLAMA, **MEGATRON)
    plan = plan_recipe(recipe)
    for layout in (plan.layout, replace(plan.layout, fused="none")):
        rendered = BACKENDS[plan.engine].render(recipe, layout)["transformer"]
        assert rendered["bias_activation_fusion"] == (layout.fused == "megatron")
    recipe = loaded(QWEN3, **MEGATRON)
    plan = plan_recipe(recipe)
    assert BACKENDS[plan.engine].render(recipe, plan.layout)["transformer"]["moe_grouped_gemm"]
    assert plan_recipe(settled(recipe, plan)).layout == plan.layout


def test_ligers_loss_needs_less_memory_and_no_less_time() -> None:
    asked = FSDP | {"training__micro_batch_size": 1, "parallel__zero__stage": 3}
    whole, chunked, fused = (
        planned(LLAMA, kernels__loss=loss, **asked) for loss in ("whole", "chunked", "liger")
    )
    assert fused.memory_gib < chunked.memory_gib < whole.memory_gib  # type: ignore[operator]
    assert fused.step_time_s == chunked.step_time_s


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        (LLAMA, LAYERS | MEGATRON, "kernels.compile: layers for engine megatron"),
        (
            LLAMA,
            LAYERS | HF | {"parallel__engine": "deepspeed", "parallel__zero__stage": 3},
            "another with kernels.compile: layers",
        ),
        (MIXTRAL, LAYERS | FSDP, "depends on data"),
        (
            LLAMA,
            FSDP | {"kernels__fused": "megatron"},
            "megatron for engine fsdp",
        ),
        (LLAMA, LIGER | MEGATRON, "for transformers' models"),
        (LLAMA, LIGER | {"cluster__gpu": "cpu"}, "Triton, which needs a GPU"),
        (LLAMA, {"kernels__loss": "liger", "cluster__gpu": "cpu"}, "Triton"),
        (LLAMA, LIGER | LAYERS | FSDP, "layers fuses the same operators"),
        (LLAMA, LIGER | HF | {"model__config__hidden_act": "gelu"}, "computes silu"),
        (
            "gpt2/gpt2-124m-pretrain",
            LIGER | HF | {"cluster__gpu": "h100-80gb"},
            "no test runs gpt2",
        ),
        (
            LLAMA,
            HF
            | {
                "kernels__loss": "liger",
                "model__config__model_type": "granite",
                "model__config__logits_scaling": 8.0,
            },
            "changes logits",
        ),
        ("llama/llama-4-scout-pretrain", GROUPED, "no grouped products for the experts of ll"),
        (LLAMA, GROUPED | MEGATRON, "the model has no experts"),
        (
            QWEN3,
            GROUPED | MEGATRON | {"model__config__moe_intermediate_size": 764},
            "8 divides, and an expert has 764",
        ),
        (LLAMA, FP8 | MEGATRON, "kernels.fp8: rowwise for engine megatron"),
        (
            LLAMA,
            FP8 | {"parallel__engine": "deepspeed", "parallel__zero__stage": 3},
            "parallel.zero.stage: 3: another with kernels.fp8",
        ),
        (MIXTRAL, FP8 | {"parallel__expert": 1} | FSDP, "torchao's products take single ones"),
        (LLAMA, FP8 | LIGER | HF, "no test runs fp8 with Liger's"),
        (LLAMA, FP8 | {"adapter": "{rank: 4, alpha: 8}"}, "rowwise with an adapter: null"),
        (LLAMA, FP8 | {"training__precision": "fp32"}, "fp32 with fp8: bf16 with fp8"),
        (
            LLAMA,
            FP8 | {"training__sequence_length": 8184},
            "sequence_length to 8192, or set kernels.fp8 to null",
        ),
        (LLAMA, FP8 | {"cluster__gpu": "a100-80gb"}, "it has no units: a GPU from Ada"),
        (TINY, {"training__precision": "fp8"}, "write bf16, and `kernels: {fp8: rowwise}`"),
        (TINY, {"training__precision": "float8"}, "write bf16, and `kernels: {fp8: rowwise}`"),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        planned(name, **settings)
    problems = (f"{p.key}: {p.found}: {p.allowed}: {p.fix}" for p in caught.value.problems)
    assert why in "; ".join(problems)


def test_a_script_of_ones_own_has_no_fp8() -> None:
    assert planned(LLAMA, **FP8).engine == "deepspeed", "auto finds where there is"
    on_gpus = FP8 | FSDP | {"cluster__gpu": "h100-80gb"}
    recipe = loaded(TINY, **on_gpus)
    plan = plan_recipe(recipe)
    assert needs_of(recipe).packages["torchao"] == "kernels.fp8: rowwise"
    assert in_accelerate(recipe, plan) is not None
    head = "launch/train.py has kernels.fp8: rowwise; a script of your own"
    assert head in render(recipe, plan)
    with pytest.raises(PlanError, match="fp8: rowwise") as caught:
        refuse_kernels(recipe)
    assert "--set kernels.fp8=null" in caught.value.fix
