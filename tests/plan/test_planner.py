"""From a recipe to a plan: what is kept, what is predicted, and errors."""

import json
from pathlib import Path

import pytest

from tests.plan.making import TINY, llama_8b, recipe
from toolkit.errors import PlanError, RecipeError
from toolkit.models.families import model_spec
from toolkit.models.hub import model_config
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import ModelSection


def test_every_decision_has_a_reason() -> None:
    plan = llama_8b(engine="deepspeed", model="hf")
    asked = "engine deepspeed with model hf: asked for"
    words = "choice: ", asked, "zero ", "micro batch ", "recompute ", "loss ", "compile "
    for reason, begin in zip(plan.reasons, (*words, "attention "), strict=True):
        assert reason.startswith(begin)
    assert llama_8b(engine="deepspeed").reasons[1].partition(": ")[2] == "engine asked for"
    assert "zero 1: asked for" in llama_8b(zero={"stage": 1}).reasons
    assert "tensor 2: asked for" in llama_8b(engine="megatron", tensor=2).reasons


@pytest.mark.parametrize(
    ("ranks", "precision", "stage"),
    [
        (1, "fp32", 0),
        (1, "bf16", 1),  # stage 0 of DeepSpeed sums micro batches in bf16
        (2, "fp32", 2),
    ],
)
def test_stage_on_cpu(ranks: int, precision: str, stage: int) -> None:
    wanted = recipe(
        cluster__gpus_per_node=ranks,
        training__precision=precision,
        parallel__engine="deepspeed",
        parallel__model="hf",
    )
    plan = plan_recipe(wanted)
    assert plan.layout.zero_stage == stage
    assert plan.peak_flops_per_gpu is None and plan.mfu is None
    assert plan.layout.recompute == "none"


def test_what_is_illegal_by_now_is_refused() -> None:
    """As when the recipe's own DeepSpeed file sets the stage after the check."""
    zero = {"stage": 2, "offload_optimizer": "nvme"}
    with pytest.raises(RecipeError, match="nvme with stage: 2"):
        plan_recipe(recipe(parallel__zero=zero))


def test_a_shape_in_a_local_folder(tmp_path: Path) -> None:
    model = ModelSection(hub=str(tmp_path))
    with pytest.raises(PlanError, match="cannot read"):
        model_config(model)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    plan = plan_recipe(recipe(model__config=None, model__hub=str(tmp_path)))
    assert plan.parameters == model_spec(TINY).parameters.total
    config.write_text(json.dumps(TINY | {"attention_dropout": 0.1}))
    assert model_config(model)["attention_dropout"] == 0.0, "it is not trained"
    for bad, message in (
        ("[]", "no map of settings"),
        ("{", "cannot read"),
        ('{"model_type": "brt"}', "model_type"),
        ('{"model_type": "bert"}', "is_decoder"),
        ('{"model_type": "cohere2", "quantization_config": {"bits": 4}}', "quantized"),
    ):
        config.write_text(bad)
        with pytest.raises(PlanError, match=message):
            model_config(model)


def test_round_trip() -> None:
    plan = llama_8b(zero={"offload_optimizer": "cpu"})
    data = json.loads(json.dumps(plan.to_dict()))
    assert Plan.from_dict(data) == plan
    for new in ("memory_gib", "fits", "step_time_s", "tokens_per_s_per_gpu", "mfu"):
        del data[new]
    assert Plan.from_dict(data).memory_gib is None, "a plan.json of the last release"
