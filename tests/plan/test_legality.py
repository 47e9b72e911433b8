"""The table of legal pairs, and what is refused of everything else."""

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
    problems,
    table,
    zero_stages,
)
from toolkit.plan.search import search
from toolkit.recipe.schema import ClusterSection, ParallelSection, ZeroSection
from toolkit.recipe.words import settings

EIGHT = ClusterSection(gpus_per_node=8)


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
        ({"recompute": "selective"}, [MEGATRON, ZERO_MEGATRON]),
        ({"engine": "fsdp", "replicate": 4}, [Pair("fsdp", "hf")]),
        ({"engine": "fsdp", "zero": {"offload_parameters": "cpu"}}, [Pair("fsdp", "hf")]),
    ],
)
def test_who_can(settings: dict[str, Any], able: list[Pair]) -> None:
    assert pairs(intent(**settings)) == able
    assert problems(intent(**settings), EIGHT) == []


REFUSED: list[tuple[dict[str, Any], list[str]]] = [  # besides those of test_mistakes.py
    # DeepSpeed#1629, #823: pipeline stages with ZeRO 2 and 3
    ({"pipeline": 2, "zero": {"stage": 2}}, ["pipeline"]),
    ({"engine": "megatron", "pipeline": 2, "zero": {"stage": 2}}, ["zero.stage"]),
    ({"engine": "deepspeed", "pipeline": 2}, ["pipeline"]),
    ({"engine": "megatron", "zero": {"offload_optimizer": "cpu"}}, ["zero.offload_optimizer"]),
    ({"engine": "fsdp", "expert": 2}, ["expert"]),
    # There is one place for all that FSDP2 moves, and it moves parameters in stage 3.
    (
        {"engine": "fsdp", "zero": {"offload_optimizer": "none", "offload_parameters": "cpu"}},
        ["zero.offload_optimizer"],
    ),
    (
        {"engine": "fsdp", "zero": {"stage": 2, "offload_optimizer": "cpu"}},
        ["zero.offload_optimizer"],
    ),
    ({"engine": "fsdp", "zero": {"offload_optimizer": "nvme"}}, ["zero.offload_optimizer"]),
    ({"engine": "fsdp", "zero": {"stage": 0}}, ["zero.stage"]),
    ({"engine": "fsdp", "replicate": 8}, ["replicate"]),
    ({"engine": "ddp", "replicate": 2}, ["replicate"]),
    (
        {"engine": "ddp", "zero": {"stage": 3, "offload_parameters": "cpu"}},
        ["zero.stage", "zero.offload_parameters"],
    ),
    # DeepSpeed would keep the states in CPU memory silently
    ({"zero": {"stage": 1, "offload_parameters": "nvme"}}, ["zero.offload_parameters"]),
    ({"zero": {"offload_parameters": "nvme"}, "recompute": "selective"}, ["recompute"]),
    ({"engine": "ddp", "recompute": "selective"}, ["recompute"]),
    ({"engine": "megatron", "model": "hf"}, ["engine"]),
    (
        {"engine": "deepspeed", "model": "megatron", "zero": {"offload_optimizer": "nvme"}},
        ["zero.offload_optimizer"],
    ),
    ({"engine": "megatron", "tensor": 3, "pipeline": 1}, ["tensor"]),
    ({"engine": "megatron", "tensor": 2, "pipeline": 16}, ["pipeline"]),
]


@pytest.mark.parametrize(("settings", "keys"), REFUSED)
def test_refused_settings_are_named_and_may_be_left_to_the_planner(
    settings: dict[str, Any], keys: list[str]
) -> None:
    asked = intent(**settings)
    found = problems(asked, EIGHT)
    assert [problem.key for problem in found] == [f"parallel.{key}" for key in keys]
    for problem in found:
        assert problem.fix.startswith(f"set {problem.key} to auto")
        asked = asked.with_values({problem.key.removeprefix("parallel."): "auto"})
    assert problems(asked, EIGHT) == []


def test_some_recomputed_layers() -> None:
    """Every engine that recomputes layers recomputes some; all of them is `full`."""
    assert not problems(intent(model="hf", recompute=2), EIGHT)
    assert pairs(intent(recompute=2)) == pairs(intent(recompute="full"))
    (problem,) = broken_rules(recipe(parallel__recompute=2))
    assert (problem.key, problem.found) == ("parallel.recompute", "2")
    assert not [*broken_rules(recipe(parallel__recompute=1))]


def test_experts_of_megatron_core_are_recomputed_in_all_layers() -> None:
    """In others, their routers would get no mask, and would not be balanced."""
    asked = {"model__config": MIXTRAL, "parallel__recompute": 1}
    (problem,) = broken_rules(recipe(**asked, parallel__model="megatron"))
    assert problem.key == "parallel.recompute" and "full" in problem.allowed
    assert not [*broken_rules(recipe(**asked))]
    chosen = search(*on("16x8xh100-80gb", "mistral/mixtral-8x7b-pretrain"))
    some = {one.pair.model for one in chosen.fitting if isinstance(one.layout.recompute, int)}
    assert some == {"hf"}


def test_every_value_of_the_schema_runs_on_some_engine() -> None:
    sections = {"parallel": ParallelSection, "zero": ZeroSection}
    offered = {
        f"{section}.{name}": set(setting.choices) - {"auto"}
        for section, fields in sections.items()
        for name, setting in settings(fields).items()
    }
    able = table().values()
    assert offered["parallel.recompute"] == {way for one in able for way in one.recompute}
    assert offered["parallel.engine"] == {pair.engine for pair in table()}
    assert offered["parallel.model"] == {pair.model for pair in table()}
    for name in ("offload_optimizer", "offload_parameters"):
        assert offered[f"zero.{name}"] == {p for one in able for p in getattr(one, name)}
    numbers = {
        name
        for name, setting in settings(ParallelSection).items()
        if "." not in name and setting.takes("integer") and not setting.takes("boolean")
    }
    degrees = {one.setting for one in DEGREES}
    assert numbers == {*degrees, "replicate", "recompute"}
    assert all(any(one.largest(name) > 1 for one in able) for name in numbers - {"recompute"})


@pytest.mark.parametrize(
    ("pair", "zero", "stages"),
    [
        (Pair("deepspeed", "hf"), {}, [0, 1, 2, 3]),
        (Pair("deepspeed", "hf"), {"stage": 1}, [1]),
        (Pair("deepspeed", "hf"), {"offload_optimizer": "cpu"}, [1, 2, 3]),
        (Pair("deepspeed", "hf"), {"offload_optimizer": "nvme"}, [3]),
        (Pair("deepspeed", "hf"), {"offload_parameters": "cpu"}, [3]),
        (MEGATRON, {}, [0, 1]),  # 1 is its distributed optimizer
    ],
)
def test_zero_stages(pair: Pair, zero: dict[str, Any], stages: list[int]) -> None:
    assert zero_stages(intent(zero=zero), pair) == stages


def test_the_largest_cluster_is_answered_at_once() -> None:
    huge = ClusterSection(nodes=65536, gpus_per_node=65536)
    (problem,) = problems(intent(engine="megatron", tensor=3, pipeline=1), huge)
    assert problem.key == "parallel.tensor"


@pytest.mark.parametrize(
    ("settings", "dp"),
    [
        ({}, None),  # megatron may split the model
        ({"engine": "ddp"}, 8),
        ({"engine": "megatron"}, None),
        ({"engine": "deepspeed", "tensor": 2}, 4),
        ({"engine": "megatron", "tensor": 2}, None),
        ({"engine": "megatron", "tensor": 2, "pipeline": 2}, 2),
        ({"engine": "megatron", "tensor": 3, "pipeline": 1}, None),
    ],
)
def test_data_parallel(settings: dict[str, Any], dp: int | None) -> None:
    assert data_parallel(intent(**settings), EIGHT) == dp
