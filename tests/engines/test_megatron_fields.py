"""Rendered megatron-core arguments against the classes of the installed version."""

import re
import tomllib
from pathlib import Path

import pytest

from toolkit.engines.megatron.fields import SUPPORTED, check_fields
from toolkit.errors import BackendUnavailable
from toolkit.intake.load import load_recipe
from toolkit.plan.estimate import estimate_plan
from toolkit.run.assignment import decide

pytestmark = pytest.mark.usefixtures("megatron_core")


def test_known_fields_are_accepted() -> None:
    check_fields(
        {
            "transformer": {"num_layers": 2},
            "gpt": {"rotary_base": 1e4, "rope_parameters": {}},
            "ddp": {"grad_reduce_in_fp32": True},
            "optimizer": {"lr": 1e-3},
        }
    )


@pytest.mark.parametrize(
    ("section", "owner"),
    [
        ("transformer", "MLATransformerConfig"),
        ("gpt", "(GPT|Hybrid)Model"),
        ("ddp", "DistributedDataParallelConfig"),
        ("optimizer", "OptimizerConfig"),
    ],
)
def test_a_field_that_is_gone_is_named(section: str, owner: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        check_fields({section: {"gone": 1}})
    assert re.search(f"has no gone in {owner}", str(caught.value))
    assert f"DMT supports megatron-core {SUPPORTED}" in str(caught.value)


def test_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"megatron-core{SUPPORTED}" in project["project"]["dependencies"]


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
