"""What an engine is built from: the planned model, what must be set beforehand, and what
megatron-core is given."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases import CONFIG, Case, recipe
from toolkit.backend import BACKENDS
from toolkit.engines.megatron.config import loaded_model
from toolkit.errors import PlanError
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import ModelSection
from toolkit.run.assignment import decide

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


def test_one_queue_to_the_gpu_for_tensor_parallel_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    split = plan_recipe(recipe(Case("megatron", 2, parallel={"tensor": 2}), world=2))
    whole = replace(split, layout=replace(split.layout, tp=1))
    assert BACKENDS[split.engine].environment(split.layout, "h100-80gb") == {name: "1"}
    assert BACKENDS[whole.engine].environment(whole.layout, "h100-80gb") == {}
    assert BACKENDS[split.engine].environment(split.layout, "cpu") == {}
    monkeypatch.setenv(name, "8")
    assert BACKENDS[split.engine].environment(split.layout, "h100-80gb") == {}, (
        "the user's own value stays"
    )


@pytest.mark.parametrize(
    ("checkpoint", "told"),
    [
        ({"rope_parameters": LINEAR}, "rope_parameters = {.*'default'.* means {.*'linear'"),
        ({"rms_norm_eps": 1e-5}, "layernorm_epsilon = 1e-06.* means 1e-05"),
    ],
)
def test_what_a_recipe_leaves_out_of_a_checkpoint_is_not_lost(
    checkpoint: dict[str, Any], told: str
) -> None:
    """The arguments were rendered from the recipe's keys, the weights belong to the hub's."""
    section = ModelSection(hub="hub/model", init="pretrained", config=CONFIG)
    assert loaded_model(section, CONFIG).gpt["vocab_size"] == CONFIG["vocab_size"]
    with pytest.raises(PlanError, match=told):
        loaded_model(section, CONFIG | checkpoint)


@pytest.mark.parametrize("gpu", ["cpu", "h100-80gb"])
def test_what_was_sent_is_freed_on_gpus(gpu: str) -> None:
    """Also where messages overlap, which gloo cannot."""
    parallel = "engine=megatron", "pipeline=2", "virtual_pipeline=2"
    settings = [f"cluster.gpu={gpu}", "cluster.gpus_per_node=2"]
    overrides = [*settings, *(f"parallel.{one}" for one in parallel)]
    file = Path(__file__).parents[2] / "recipes/tiny/llama-bytes.yaml"
    assignment = decide(load_recipe(file, overrides), None)
    messages = assignment.engine_config["transformer"]
    assert messages["overlap_p2p_comm"] and not messages["batch_p2p_sync"]
    assert messages["deallocate_pipeline_outputs"] is (gpu != "cpu")
