"""What an engine is built from: the planned model, and what must be set beforehand."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.parity_worker import CONFIG, Case, recipe
from toolkit.backend import BACKENDS
from toolkit.engines.megatron.config import loaded_model
from toolkit.errors import PlanError
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import ModelSection

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
