"""The table of legal pairs, and the nearest legal alternative for everything else."""

from typing import Any

import pytest

from tests.plan.making import MIXTRAL, intent, on, recipe
from toolkit.intake.checks import broken_rules
from toolkit.layout import Pair
from toolkit.plan.dimensions import DEGREES
from toolkit.plan.rules.legality import (
    chosen_from,
    data_parallel,
    pairs,
    precisions,
    problems,
    table,
    zero_stages,
)
from toolkit.plan.search import search
from toolkit.recipe.describe import accepts, choices
from toolkit.recipe.schema import ClusterSection, ParallelSection, TrainingSection, ZeroSection

EIGHT = ClusterSection(gpus_per_node=8)


def test_table_is_the_designs() -> None:
    assert set(table()) == {
        ("deepspeed", "hf"), ("deepspeed", "megatron"), ("megatron", "megatron"),
        ("fsdp", "hf"), ("ddp", "hf"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine": "ddp"},
        {"engine": "ddp", "zero": {"stage": 0}},
        {"zero": {"stage": 3, "offload_parameters": "nvme", "nvme_path": "/x"}},
        {"zero": {"offload_optimizer": "nvme"}},
        {"tensor": 1, "pipeline": 1, "virtual_pipeline": 1},
        {"recompute": "full"},
        {"engine": "ddp", "recompute": "none"},
        {"engine": "fsdp", "recompute": "full", "zero": {"stage": 2}},
        {"engine": "fsdp", "zero": {"offload_optimizer": "cpu"}},
    ],
)
def test_legal(settings: dict[str, Any]) -> None:
    assert problems(intent(**settings), EIGHT) == []
    assert pairs(intent(**settings))


MEGATRON, ZERO_MEGATRON = Pair("megatron", "megatron"), Pair("deepspeed", "megatron")


def test_auto_compares_deepspeed_and_megatron_core_where_these_can() -> None:
    assert chosen_from(pairs(intent()), intent()) == [Pair("deepspeed", "hf"), MEGATRON]
    assert chosen_from([ZERO_MEGATRON], intent()) == [ZERO_MEGATRON]
    stated = intent(engine="deepspeed")
    assert chosen_from(pairs(stated), stated) == [Pair("deepspeed", "hf"), ZERO_MEGATRON]


@pytest.mark.parametrize(
    ("settings", "able"),
    [
        ({"zero": {"stage": 2}}, [Pair("deepspeed", "hf"), Pair("fsdp", "hf"), ZERO_MEGATRON]),
        ({"tensor": 2}, [MEGATRON, ZERO_MEGATRON]),
        ({"engine": "deepspeed", "tensor": 2}, [ZERO_MEGATRON]),
        ({"tensor": 2, "zero": {"stage": 3}}, [ZERO_MEGATRON]),
        ({"tensor": 2, "zero": {"offload_optimizer": "cpu"}}, [ZERO_MEGATRON]),
        ({"engine": "deepspeed", "tensor": 2, "zero": {"config": "zero1"}}, [ZERO_MEGATRON]),
        ({"engine": "megatron", "zero": {"stage": 1}}, [MEGATRON]),
        ({"pipeline": 4, "virtual_pipeline": 2}, [MEGATRON]),
        ({"expert": 2}, [MEGATRON]),
        ({"sequence": True}, [MEGATRON, ZERO_MEGATRON]),
        ({"engine": "fsdp", "zero": {"offload_parameters": "cpu"}}, [Pair("fsdp", "hf")]),
    ],
)
def test_who_can(settings: dict[str, Any], able: list[Pair]) -> None:
    assert pairs(intent(**settings)) == able
    assert problems(intent(**settings), EIGHT) == []


@pytest.mark.parametrize(
    ("settings", "keys", "fix"),
    [
        # DeepSpeed#1629, #823: pipeline stages with ZeRO 2 and 3
        (
            {"pipeline": 2, "zero": {"stage": 2}},
            ["parallel.pipeline"],
            "to 1, or parallel.zero.stage to 1",
        ),
        (
            {"engine": "megatron", "pipeline": 2, "zero": {"stage": 2}},
            ["parallel.zero.stage"],
            "to auto",
        ),
        (
            {"engine": "deepspeed", "pipeline": 2},
            ["parallel.pipeline"],
            "to 1, or parallel.engine to megatron",
        ),
        (
            {"engine": "deepspeed", "model": "hf", "pipeline": 2},
            ["parallel.pipeline"],
            "to 1, or parallel.engine to megatron and parallel.model to megatron",
        ),
        ({"engine": "megatron", "zero": {"stage": 3}}, ["parallel.zero.stage"], "deepspeed"),
        (
            {"engine": "megatron", "zero": {"config": "zero1"}},
            ["parallel.zero.config"],
            "remove",
        ),
        (
            {"engine": "megatron", "zero": {"offload_optimizer": "cpu"}},
            ["parallel.zero.offload_optimizer"],
            "to none, or set parallel.engine to deepspeed",
        ),
        (
            {"engine": "fsdp", "expert": 2},
            ["parallel.expert"],
            "or parallel.engine to megatron",
        ),
        # There is one place for all that FSDP2 moves, and it moves parameters in stage 3.
        (
            {
                "engine": "fsdp",
                "zero": {"offload_optimizer": "cpu", "offload_parameters": "none"},
            },
            ["parallel.zero.offload_optimizer"],
            "offload_parameters to cpu, or set parallel.engine to deepspeed",
        ),
        (
            {
                "engine": "fsdp",
                "zero": {"offload_optimizer": "none", "offload_parameters": "cpu"},
            },
            ["parallel.zero.offload_parameters"],
            "offload_optimizer to cpu, or set parallel.engine to deepspeed",
        ),
        (
            {"engine": "fsdp", "zero": {"stage": 2, "offload_optimizer": "cpu"}},
            ["parallel.zero.offload_optimizer"],
            "stage to 3 (or auto), or set parallel.engine to deepspeed",
        ),
        (
            {"engine": "fsdp", "zero": {"offload_optimizer": "nvme"}},
            ["parallel.zero.offload_optimizer"],
            "to cpu, or set parallel.engine to deepspeed",
        ),
        ({"engine": "fsdp", "zero": {"stage": 0}}, ["parallel.zero.stage"], "to auto, or set"),
        ({"engine": "fsdp", "tensor": 2}, ["parallel.tensor"], "to 1, or parallel.engine to"),
        ({"engine": "ddp", "zero": {"stage": 3}}, ["parallel.zero.stage"], "deepspeed"),
        ({"engine": "ddp", "zero": {"config": "x"}}, ["parallel.zero.config"], "remove it"),
        (
            {"engine": "ddp", "zero": {"stage": 3, "offload_parameters": "cpu"}},
            ["parallel.zero.stage", "parallel.zero.offload_parameters"],
            "deepspeed",
        ),
        # DeepSpeed would keep the states in CPU memory silently
        (
            {"zero": {"stage": 2, "offload_optimizer": "nvme"}},
            ["parallel.zero.offload_optimizer"],
            "to 3 (or auto)",
        ),
        (
            {"zero": {"stage": 0, "offload_optimizer": "nvme"}},
            ["parallel.zero.offload_optimizer"],
            "to 3 (or auto)",
        ),
        (
            {"zero": {"stage": 1, "offload_parameters": "nvme"}},
            ["parallel.zero.offload_parameters"],
            "to 3 (or auto)",
        ),
        (
            {"zero": {"offload_parameters": "nvme"}, "recompute": "selective"},
            ["parallel.recompute"],
            "to full (or auto)",
        ),
        ({"engine": "ddp", "recompute": "selective"}, ["parallel.recompute"], "to full"),
        ({"model": "hf", "recompute": "selective"}, ["parallel.recompute"], "to full"),
        ({"model": "hf", "pipeline": 4}, ["parallel.pipeline"], "parallel.model to mega"),
        ({"engine": "ddp", "tensor": 4}, ["parallel.tensor"], "parallel.engine to megatron"),
        ({"engine": "megatron", "model": "hf"}, ["parallel.engine"], "deepspeed"),
        ({"engine": "fsdp", "model": "megatron"}, ["parallel.model"], "to hf"),
        ({"sequence": True, "tensor": 1}, ["parallel.sequence"], "auto"),
        ({"virtual_pipeline": 2, "pipeline": 1}, ["parallel.virtual_pipeline"], "auto"),
        (
            {"engine": "deepspeed", "model": "megatron", "zero": {"offload_optimizer": "nvme"}},
            ["parallel.zero.offload_optimizer"],
            "to cpu",
        ),
    ],
)
def test_nearest_legal(settings: dict[str, Any], keys: list[str], fix: str) -> None:
    found = problems(intent(**settings), EIGHT)
    assert [problem.key for problem in found] == keys
    assert all(fix in problem.fix for problem in found)


def test_why_pipeline_stages_exclude_zero() -> None:
    for engine in ("auto", "megatron"):
        asked = intent(engine=engine, pipeline=2, zero={"stage": 2})
        (problem,) = problems(asked, EIGHT)
        assert "pipeline stages exclude ZeRO 2 and 3" in problem.allowed


def test_selective_recompute_is_megatrons() -> None:
    (problem,) = problems(intent(model="hf", recompute="selective"), EIGHT)
    assert problem.allowed.startswith("none, full for engine deepspeed with model hf: sel")
    assert {pair.model for pair in pairs(intent(recompute="selective"))} == {"megatron"}


def test_some_recomputed_layers() -> None:
    """Every engine that recomputes layers recomputes some; all of them is `full`."""
    assert not problems(intent(model="hf", recompute=2), EIGHT)
    assert pairs(intent(recompute=2)) == pairs(intent(recompute="full"))
    (problem,) = broken_rules(recipe(parallel__recompute=2))
    assert (problem.key, problem.found) == ("parallel.recompute", "2")
    assert "full" in problem.fix
    assert not [*broken_rules(recipe(parallel__recompute=1))]


def test_experts_of_megatron_core_are_recomputed_in_all_layers() -> None:
    """In others, their routers would get no mask, and would not be balanced."""
    asked = {"model__config": MIXTRAL, "parallel__recompute": 1}
    (problem,) = broken_rules(recipe(**asked, parallel__model="megatron"))
    assert problem.key == "parallel.recompute" and "to full" in problem.fix
    assert not [*broken_rules(recipe(**asked))]
    chosen = search(*on("16x8xh100-80gb", "mistral/mixtral-8x7b-pretrain"))
    some = {one.pair.model for one in chosen.fitting if isinstance(one.layout.recompute, int)}
    assert some == {"hf"}


def test_precisions() -> None:
    illegal = intent(engine="fsdp", model="megatron")
    for parallel in (intent(), intent(engine="ddp"), intent(tensor=2), illegal):
        assert precisions(parallel) == ["fp32", "fp16", "bf16"]
    assert pairs(intent(), "fp16") == pairs(intent())


def test_every_value_of_the_schema_runs_on_some_engine() -> None:
    sections = {"training": TrainingSection, "parallel": ParallelSection, "zero": ZeroSection}
    offered = {
        f"{section}.{name}": set(choices(info.annotation)) - {"auto"}
        for section, fields in sections.items()
        for name, info in fields.model_fields.items()
    }
    able = table().values()
    assert offered["training.precision"] == {p for one in able for p in one.precisions}
    assert offered["parallel.recompute"] == {way for one in able for way in one.recompute}
    assert any(one.without_overlap for one in able), "parallel.overlap: none"
    assert offered["parallel.engine"] == {pair.engine for pair in table()}
    assert offered["parallel.model"] == {pair.model for pair in table()}
    for name in ("offload_optimizer", "offload_parameters"):
        assert offered[f"zero.{name}"] == {p for one in able for p in getattr(one, name)}
    numbers = {
        name
        for name, info in ParallelSection.model_fields.items()
        if accepts(info.annotation, int) and not accepts(info.annotation, bool)
    }
    degrees = {one.setting for one in DEGREES if one.key}
    assert numbers == {*degrees, "replicate", "recompute"}
    assert all(any(one.largest(name) > 1 for one in able) for name in numbers - {"recompute"})


@pytest.mark.parametrize(
    ("zero", "stages"),
    [
        ({}, [0, 1, 2, 3]),
        ({"stage": 1}, [1]),
        ({"offload_optimizer": "cpu"}, [1, 2, 3]),
        ({"offload_optimizer": "nvme"}, [3]),
        ({"offload_parameters": "cpu"}, [3]),
    ],
)
def test_zero_stages(zero: dict[str, Any], stages: list[int]) -> None:
    assert zero_stages(intent(zero=zero), Pair("deepspeed", "hf")) == stages


def test_copies_of_shards() -> None:
    """Equally many ranks each, two or more, and on the device."""

    def refused(**parallel: Any) -> tuple[str, str, str]:
        (problem,) = problems(intent(**parallel), EIGHT)
        return problem.key, problem.allowed, problem.fix

    assert problems(intent(engine="fsdp", replicate=4), EIGHT) == []
    key, allowed, fix = refused(engine="fsdp", replicate=8)
    assert (key, fix) == ("parallel.replicate", "set parallel.replicate to 4")
    assert allowed.startswith("1 or 2 or 4: ")
    key, allowed, fix = refused(engine="ddp", replicate=2)
    assert (key, allowed) == ("parallel.replicate", "1 for engine ddp with model hf")
    assert fix == "set parallel.replicate to 1, or parallel.engine to fsdp"
    zero = {"offload_parameters": "cpu"}
    assert refused(engine="fsdp", replicate=2, zero=zero)[0] == "parallel.replicate"


def test_megatrons_stages_are_its_distributed_optimizer() -> None:
    assert zero_stages(intent(), MEGATRON) == [0, 1]


def test_degrees_must_divide_the_world() -> None:
    (problem,) = problems(intent(engine="megatron", tensor=3, pipeline=1), EIGHT)
    assert (problem.key, problem.fix) == ("parallel.tensor", "set parallel.tensor to 2")
    assert problems(intent(engine="megatron", tensor=4, pipeline=2), EIGHT) == []


@pytest.mark.parametrize(
    ("ranks", "degrees", "key", "fix"),
    [
        (1, {"tensor": 4, "pipeline": 2}, "tensor", "tensor to 1 and parallel.pipeline to 1"),
        (4, {"tensor": 3, "pipeline": 3}, "tensor", "tensor to 2 and parallel.pipeline to 2"),
        (6, {"tensor": 4, "pipeline": 6}, "pipeline",
         "tensor to 3 and parallel.pipeline to 2"),
        (8, {"tensor": 2, "pipeline": 16}, "pipeline", "pipeline to 4"),
        (6, {"tensor": 5}, "tensor", "tensor to 6"),
    ],
)  # fmt: skip
def test_every_degree_that_is_too_large_is_named(
    ranks: int, degrees: dict[str, int], key: str, fix: str
) -> None:
    cluster = ClusterSection(gpus_per_node=ranks)
    (problem,) = problems(intent(engine="megatron", **degrees), cluster)
    assert (problem.key, problem.fix.split(", or use ")[0]) == (
        f"parallel.{key}", f"set parallel.{fix}",
    )  # fmt: skip


def test_the_largest_cluster_is_answered_at_once() -> None:
    huge = ClusterSection(nodes=65536, gpus_per_node=65536)
    (problem,) = problems(intent(engine="megatron", tensor=3, pipeline=1), huge)
    assert problem.fix == "set parallel.tensor to 2"


def test_data_parallel() -> None:
    assert data_parallel(intent(), EIGHT) is None, "megatron may split the model"
    assert data_parallel(intent(engine="ddp"), EIGHT) == 8
    assert data_parallel(intent(engine="megatron"), EIGHT) is None
    assert data_parallel(intent(engine="deepspeed", tensor=2), EIGHT) == 4
    assert data_parallel(intent(engine="megatron", tensor=2), EIGHT) is None
    assert data_parallel(intent(engine="megatron", tensor=2, pipeline=2), EIGHT) == 2
    assert data_parallel(intent(engine="megatron", tensor=3, pipeline=1), EIGHT) is None
