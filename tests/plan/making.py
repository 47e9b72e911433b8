"""Recipes, jobs and layouts that tests of the planner share."""

from functools import cache
from pathlib import Path
from typing import Any

from toolkit.intake.load import load_recipe
from toolkit.plan.hardware.cluster import Cluster, parse_cluster
from toolkit.plan.plan import Plan
from toolkit.plan.planner import explore, plan_recipe
from toolkit.plan.request import PlanRequest
from toolkit.plan.search import Search, search
from toolkit.recipe.schema import (
    ClusterSection,
    OptimizerName,
    OptimizerSection,
    ParallelSection,
    Recipe,
)


def intent(**settings: Any) -> ParallelSection:
    return ParallelSection.model_validate(settings)


def optimizer_of(name: OptimizerName) -> OptimizerSection:
    """Its defaults."""
    return OptimizerSection(name=name, learning_rate=1.0)


RECIPES = Path(__file__).parents[2] / "recipes"

LLAMA_8B = load_recipe(
    RECIPES / "llama/llama-3.1-8b-pretrain.yaml",
    ("cluster.nodes=1", "training.sequence_length=2048", "training.global_batch_size=32"),
)

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def recipe(**changes: Any) -> Recipe:
    """A tiny recipe; `section__key=value` changes a setting."""
    sections: dict[str, Any] = {
        "name": "tiny",
        "model": {"config": TINY},
        "data": {"train": {"kind": "text", "files": ["x"]}},
        "training": {"steps": 1, "sequence_length": 64, "global_batch_size": 8},
        "optimizer": {"learning_rate": 1e-3},
    }
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        sections.setdefault(section, {})[key] = value
    return Recipe.model_validate(sections)


def llama_8b(
    gpus: int = 8, gpu: str = "h100-80gb", batch: int = 32, length: int = 2048, **parallel: Any
) -> Plan:
    """The plan of Llama 3.1 8B on one node."""
    update = {
        "parallel": intent(**parallel),
        "cluster": LLAMA_8B.cluster.model_copy(update={"gpus_per_node": gpus, "gpu": gpu}),
        "training": LLAMA_8B.training.model_copy(
            update={"global_batch_size": batch, "sequence_length": length}
        ),
    }
    return plan_recipe(LLAMA_8B.model_copy(update=update))


MIXTRAL = TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 4}


def on(cluster: str, name: str, **parallel: Any) -> tuple[PlanRequest, Cluster]:
    """A sized recipe on a cluster, everything open but for `parallel`."""
    wanted = load_recipe(RECIPES / f"{name}.yaml")
    place = parse_cluster(cluster)
    where = section(place)
    assert wanted.model.config is not None
    return PlanRequest(intent(**parallel), where, wanted.training, wanted.model.config), place


def section(cluster: Cluster) -> ClusterSection:
    return ClusterSection(
        nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node, gpu=cluster.gpu.name
    )


@cache
def found(cluster: str, name: str) -> Search:
    return search(*on(cluster, name))


def tiny(ranks: int, batch: int = 8, length: int = 64, **parallel: Any) -> Search:
    """The search for a tiny model on CPU."""
    sections = {f"parallel__{name}": value for name, value in parallel.items()}
    return explore(
        recipe(
            cluster__gpus_per_node=ranks,
            training__global_batch_size=batch,
            training__sequence_length=length,
            training__precision="fp32",
            **sections,
        )
    )
