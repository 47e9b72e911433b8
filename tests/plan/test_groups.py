"""Clusters of different accelerators: what the planner computes of them, against clusters of
one kind and against every division of the layers."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.making import RECIPES, on, recipe
from toolkit.errors import PlanError, RecipeError
from toolkit.hardware.cluster import Cluster, default_cluster, mixed, parse_cluster
from toolkit.intake.checks import broken_rules
from toolkit.intake.load import load_recipe
from toolkit.layout import Layout, Pair
from toolkit.plan.cost.memory import stage_memory
from toolkit.plan.cost.time import step_time
from toolkit.plan.planner import explore, placed_on, plan_recipe
from toolkit.plan.search import demand, evaluate, search
from toolkit.plan.workloads import workload_of
from toolkit.text.units import GIB

MIXED = "1x8xa100-80gb+1x8xh100-80gb"
LLAMA_1B = "llama/llama-3.2-1b-pretrain"
MEGATRON = Pair("megatron", "megatron")


def cpus(*speeds: float) -> Cluster:
    return mixed([replace(default_cluster(1, 1, "cpu"), speed=speed) for speed in speeds])


@pytest.mark.parametrize("speed", [0.5, 0.25])
def test_layers_by_speed_are_the_best_of_all_divisions(speed: float) -> None:
    place = cpus(1.0, speed)
    wanted = load_recipe(RECIPES / "tiny/llama-bytes.yaml", [
        "model.config.num_hidden_layers=12", "parallel.engine=megatron",
        "parallel.pipeline=2", "parallel.virtual_pipeline=1", "training.micro_batch_size=1",
    ])  # fmt: skip
    best = explore(wanted, place).best
    every = {
        first: evaluate(
            workload_of(explore(wanted, place).job, MEGATRON),
            replace(best.layout, stages=(first, 12 - first)),
            place,
        ).step_s
        for first in range(1, 12)
    }
    fastest = min(every, key=lambda first: every[first] or 0.0)
    assert best.layout.stages == (fastest, 12 - fastest)
    assert fastest == (8 if speed == 0.5 else 10), "2:1, and about 4:1"
    plan = plan_recipe(wanted, place)
    assert any(line.startswith(f"layers {fastest}+{12 - fastest}: ") for line in plan.reasons)
    assert plan.layout == Layout.from_dict(plan.layout.to_dict())


def test_each_stage_computes_at_the_speed_of_its_own_gpus() -> None:
    job, place = on(MIXED, LLAMA_1B, engine="megatron", pipeline=2)
    workload = workload_of(job, MEGATRON)
    layout = Layout(dp=8, pp=2, stages=(6, 10), zero_stage=1, gradient_accumulation=64)
    found = step_time(workload, layout, place).passes
    for stage, kind in enumerate(("2x8xa100-80gb", "2x8xh100-80gb")):
        alone = step_time(workload, layout, parse_cluster(kind)).passes[stage]
        assert found[stage] == pytest.approx(alone, rel=1e-9)
    assert found[0][0] / 6 > 1.3 * found[1][0] / 10


def test_ranks_of_a_stage_wait_for_the_slowest() -> None:
    job, place = on(MIXED, LLAMA_1B)
    workload = workload_of(job, Pair("fsdp", "hf"))
    even = Layout(dp=16, zero_stage=3, micro_batch=2, gradient_accumulation=16)
    slow = step_time(workload, even, parse_cluster("2x8xa100-80gb")).passes
    assert step_time(workload, even, place).passes == slow
    uneven = replace(even, micro_batch=3, shares=(1,) * 8 + (3,) * 8)
    fast = replace(even, micro_batch=3)
    passes = step_time(workload, uneven, place).passes
    assert passes == step_time(workload, fast, parse_cluster("2x8xh100-80gb")).passes


def test_samples_by_speed_are_faster_than_even_ones() -> None:
    found = search(*on(MIXED, LLAMA_1B, pipeline=1, tensor=1))
    best = found.best.layout
    first, last = best.shares[0], best.shares[-1]
    assert best.shares == (first,) * 8 + (last,) * 8
    assert first < last == best.micro_batch
    assert best.global_batch == found.job.training.global_batch_size
    even = [one for one in found.fitting if not one.layout.shares]
    assert found.best.step_s < 0.95 * min(one.step_s or 0.0 for one in even)  # type: ignore[operator]


def test_each_rank_must_fit_its_own_gpu() -> None:
    """The larger stage is on the larger GPU: neither kind alone decides."""
    place = parse_cluster("1x8xa100-40gb+1x8xh100-80gb")
    job, _ = on("2x8xa100-40gb", LLAMA_1B)
    workload = workload_of(job, MEGATRON)
    layout = Layout(dp=8, pp=2, zero_stage=1, micro_batch=4, gradient_accumulation=16)
    for stages in ((4, 12), (12, 4)):
        divided = replace(layout, stages=stages)
        small, large = (stage_memory(workload, divided, n).total / GIB for n in (0, 1))
        shares = small / 39.4, large / 79.1
        one = demand(workload, divided, place)
        assert (one.memory_gib, one.capacity_gib) == max(
            ((small, 39.4), (large, 79.1)), key=lambda pair: pair[0] / pair[1]
        ), shares


def test_a_tensor_group_of_different_gpus_is_refused() -> None:
    job, place = on("1x4xa100-80gb+1x4xh100-80gb", "llama/llama-3.1-8b-pretrain", tensor=8)
    with pytest.raises(PlanError, match="would reach across different GPUs"):
        search(job, place)


def test_equal_groups_are_more_nodes() -> None:
    assert replace(parse_cluster("1x8xh200+2x8xh200"), name="") == replace(
        parse_cluster("3x8xh200"), name=""
    )
    with pytest.raises(PlanError, match="nodes of 4 and 8 GPUs"):
        parse_cluster("1x8xh200+1x4xh100-80gb")


def test_a_recipe_of_groups_is_planned_as_the_same_cluster() -> None:
    place = parse_cluster(MIXED)
    wanted = load_recipe(RECIPES / f"{LLAMA_1B}.yaml", [], place)
    assert wanted.cluster.world_size == 16
    assert placed_on(wanted, place) == wanted
    assert plan_recipe(wanted, explained=False) == plan_recipe(wanted, place, explained=False)
    plain = load_recipe(RECIPES / f"{LLAMA_1B}.yaml", [], parse_cluster("2x8xh100-80gb"))
    assert placed_on(wanted, parse_cluster("2x8xh100-80gb")).cluster == plain.cluster


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"stages": (1, 2), "pipeline": 2}, "parallel.stages"),
        ({"stages": (1, 1), "pipeline": 1, "virtual_pipeline": 1}, "parallel.stages"),
        ({"stages": (1, 1), "engine": "ddp"}, "parallel.stages"),
    ],
)
def test_stages_that_do_not_suit_the_model(settings: dict[str, object], key: str) -> None:
    """It has two layers."""
    stated = {
        f"parallel__{name}": value for name, value in {"engine": "megatron", **settings}.items()
    }
    wanted = recipe(**stated, cluster__gpus_per_node=2)
    assert key in {one.key for one in broken_rules(wanted)}


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"groups": [{"gpu": "cpu"}, {"gpu": "h200"}]}, "cluster.groups"),
        ({"groups": [{"gpu": "h900"}, {"gpu": "h200"}]}, "cluster.groups[0].gpu"),
        (
            {"groups": [{"gpu": "h200"}, {"gpu": "b200", "gpus_per_node": 2}]},
            "cluster.groups[1].gpus_per_node",
        ),
    ],
)
def test_groups_that_do_not_belong_together(cluster: dict[str, object], key: str) -> None:
    wanted = recipe(**{f"cluster__{name}": value for name, value in cluster.items()})
    assert key in {one.key for one in broken_rules(wanted)}


def test_groups_on_top_of_a_recipe_that_states_the_cluster(tmp_path: Path) -> None:
    """One error, at the groups; what it says to write there helps."""
    groups = "groups: [{gpus_per_node: 8, gpu: a100-80gb}, {gpus_per_node: 8, gpu: h200}]"
    child, base = tmp_path / "recipe.yaml", RECIPES / f"{LLAMA_1B}.yaml"
    child.write_text(f"extends: {base}\ncluster:\n  {groups}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(child)
    (only,) = caught.value.problems
    assert (only.key, only.file, only.line) == ("cluster.groups", str(child), 3)
    assert only.found == "groups next to cluster.nodes: 16, cluster.gpu: h100-80gb"
    assert only.fix.startswith("write nodes: 2, gpu: a100-80gb next to groups, or remove what")
    child.write_text(f"{child.read_text()}  {only.allowed.replace(', ', chr(10) + '  ')}\n")
    assert load_recipe(child).cluster.world_size == 16


def test_groups_are_not_elastic() -> None:
    """Which of them is lost is not known."""
    wanted = recipe(
        cluster__groups=[{"gpu": "h200"}, {"gpu": "h100-80gb"}],
        launch__launcher="torchrun",
        launch__max_restarts=3,
        launch__elastic={"min_nodes": 1, "max_nodes": 2},
    )
    assert "launch.elastic" in {one.key for one in broken_rules(wanted)}
