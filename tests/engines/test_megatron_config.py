"""The rendered megatron-core arguments."""

from pathlib import Path

import pytest

from toolkit.intake.load import load_recipe
from toolkit.plan.estimate import estimate_plan
from toolkit.run.assignment import decide


@pytest.mark.parametrize("gpu", ["cpu", "h100-80gb"])
def test_what_was_sent_is_freed_on_gpus(gpu: str) -> None:
    """Also where messages overlap, which gloo cannot; the planner knows."""
    parallel = "engine=megatron", "pipeline=2", "virtual_pipeline=2"
    settings = [f"cluster.gpu={gpu}", "cluster.gpus_per_node=2"]
    overrides = [*settings, *(f"parallel.{one}" for one in parallel)]
    recipe = Path(__file__).parents[2] / "recipes/tiny/llama-bytes.yaml"
    assignment = decide(load_recipe(recipe, overrides), None)
    messages = assignment.engine_config["transformer"]
    assert messages["overlap_p2p_comm"] and not messages["batch_p2p_sync"]
    assert messages["deallocate_pipeline_outputs"] is (gpu != "cpu")
    workload = estimate_plan(assignment.recipe, assignment.plan).setup.workload
    assert workload.keeps_sent is (gpu == "cpu")
