"""What the plan decides for all engines alike: attention, and fp16's first loss scale."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.models.small import FAMILIES, tiny
from tests.plan.making import TINY, recipe
from toolkit.backend import BACKENDS
from toolkit.engines.distributed import Ranks
from toolkit.engines.fsdp.engine import loss_scaler
from toolkit.engines.setup import EngineSetup
from toolkit.models.families import attention, megatron_model, unsupported
from toolkit.models.weights import WeightSource
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe

GPU = {"cluster__gpus_per_node": 2, "cluster__gpu": "h100-80gb"}


def planned(engine: str, precision: str) -> tuple[Plan, dict[str, Any]]:
    wanted = recipe(**GPU, parallel__engine=engine, training__precision=precision)
    plan = plan_recipe(wanted)
    return plan, BACKENDS[plan.engine].render(wanted, plan.layout)


def scale_of_a_ranks_mean_loss(plan: Plan, config: dict[str, Any]) -> float:
    """What the engine's own configuration multiplies the mean loss of a rank's tokens by."""
    if plan.engine == "deepspeed":
        assert config["fp16"]["loss_scale"] == 0, "dynamic"
        return 2.0 ** config["fp16"]["initial_scale_power"]
    if plan.engine == "megatron":
        tokens = 64 * plan.layout.micro_batch * plan.layout.gradient_accumulation
        return float(config["optimizer"]["initial_loss_scale"] * tokens)
    setup = SimpleNamespace(
        ranks=SimpleNamespace(device=SimpleNamespace(type="cpu")),
        precision="fp16",
        plan=plan,
    )
    return float(loss_scaler(cast(EngineSetup, setup)).get_scale())


@pytest.mark.parametrize("engine", ["deepspeed", "megatron", "ddp", "fsdp"])
def test_fp16_begins_with_one_loss_scale_in_every_engine(engine: str) -> None:
    plan, config = planned(engine, "fp16")
    assert plan.to_dict()["loss_scale"] == 65536.0
    assert scale_of_a_ranks_mean_loss(plan, config) == 65536.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_have_no_loss_scale(precision: str) -> None:
    plan, config = planned("megatron", precision)
    assert plan.to_dict()["loss_scale"] is None
    assert "initial_loss_scale" not in config["optimizer"]


def test_megatrons_scale_is_a_power_of_two() -> None:
    """Of any number of tokens, and never below its own smallest one."""
    changes = {"training__sequence_length": 100, "training__global_batch_size": 6}
    wanted = recipe(**GPU, **changes, parallel__engine="megatron", training__precision="fp16")
    layout = plan_recipe(wanted).layout
    given = BACKENDS["megatron"].render(wanted, layout)["optimizer"]
    assert given["initial_loss_scale"] == 65536 / 256, "300 tokens of a rank"
    assert math.log2(given["min_loss_scale"]) == -8


def test_an_older_plan_is_read() -> None:
    plan, _ = planned("ddp", "bf16")
    old = {k: v for k, v in plan.to_dict().items() if k not in ("attention", "loss_scale")}
    assert Plan.from_dict(old) == replace(plan, attention=None)


@pytest.mark.parametrize("stated", [None, "eager"])
def test_the_plans_attention_is_what_the_model_gets(stated: str | None) -> None:
    wanted = recipe(parallel__engine="ddp")
    plan = plan_recipe(wanted)
    config = AutoConfig.for_model(**TINY, attn_implementation=stated)
    weights = cast(WeightSource, SimpleNamespace(shapes={}))
    setup = EngineSetup.of(wanted, plan, {}, cast(Ranks, None), config, weights)
    assert plan.to_dict()["attention"] == setup.model_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_attention_is_the_one_of_transformers(family: str) -> None:
    """Its default: sdpa where the class supports it; megatron-core's computes the same."""
    known = tiny(family)
    config = AutoConfig.for_model(**known)
    supported = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa
    assert attention(known) == ("sdpa" if supported else "eager")
    if not supported and not unsupported(known):
        model = megatron_model(known)
        sinks = model.transformer.get("softmax_type") == "learnable"
        assert model.score_cap or sinks, "without either, megatron-core's is sdpa"
