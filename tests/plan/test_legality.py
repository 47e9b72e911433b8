"""The table of legal pairs, and the nearest legal alternative for everything else."""

from typing import Any

import pytest

from toolkit.plan.legality import AVAILABLE, TABLE, Pair, data_parallel, pairs, problems
from toolkit.recipe.schema import ClusterSection, ParallelSection

EIGHT = ClusterSection(gpus_per_node=8)


def intent(**settings: Any) -> ParallelSection:
    return ParallelSection.model_validate(settings)


def test_table_is_the_designs() -> None:
    assert set(TABLE) == {
        ("deepspeed", "hf"), ("deepspeed", "megatron"), ("megatron", "megatron"),
        ("fsdp", "hf"), ("ddp", "hf"),
    }  # fmt: skip
    assert TABLE.keys() >= AVAILABLE


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine": "ddp"},
        {"engine": "ddp", "zero": {"stage": 0}},
        {"zero": {"stage": 3, "offload_parameters": "nvme", "nvme_path": "/x"}},
        {"tensor": 1, "pipeline": 1, "virtual_pipeline": 1},
    ],
)
def test_legal(settings: dict[str, Any]) -> None:
    assert problems(intent(**settings), EIGHT) == []
    assert pairs(intent(**settings))


def test_ddp_for_zero_is_no_choice() -> None:
    assert pairs(intent(zero={"stage": 2})) == [Pair("deepspeed", "hf")]


@pytest.mark.parametrize(
    ("settings", "keys", "fix"),
    [
        # PAINS 7: DeepSpeed#1629, #823: pipeline stages with ZeRO 2 and 3
        ({"pipeline": 2, "zero": {"stage": 2}}, ["parallel.pipeline"], "to 1"),
        ({"engine": "deepspeed", "pipeline": 2}, ["parallel.pipeline"], "to 1"),
        ({"engine": "ddp", "zero": {"stage": 3}}, ["parallel.zero.stage"], "deepspeed"),
        ({"engine": "ddp", "zero": {"config": "x"}}, ["parallel.zero.config"], "remove it"),
        (
            {"engine": "ddp", "zero": {"stage": 3, "offload_parameters": "cpu"}},
            ["parallel.zero.stage", "parallel.zero.offload_parameters"],
            "deepspeed",
        ),
        ({"model": "hf", "tensor": 4}, ["parallel.tensor"], "to 1"),
        ({"tensor": 4}, ["parallel.tensor"], "to 1"),
        ({"engine": "megatron"}, ["parallel.engine"], "deepspeed"),
        ({"engine": "megatron", "tensor": 2}, ["parallel.engine"], "deepspeed"),
        ({"engine": "megatron", "model": "hf"}, ["parallel.engine"], "deepspeed"),
        ({"engine": "fsdp", "model": "megatron"}, ["parallel.model"], "hf"),
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


def test_what_is_to_come_is_named() -> None:
    (problem,) = problems(intent(context=2), EIGHT)
    assert "engine megatron with model megatron is not in this release" in problem.allowed


def test_degrees_must_divide_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.plan.legality.AVAILABLE", frozenset(TABLE))
    (problem,) = problems(intent(engine="megatron", tensor=3, pipeline=1), EIGHT)
    assert (problem.key, problem.fix) == ("parallel.tensor", "set parallel.tensor to 2")
    assert problems(intent(engine="megatron", tensor=4, pipeline=2), EIGHT) == []


def test_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_parallel(intent(), EIGHT) == 8
    monkeypatch.setattr("toolkit.plan.legality.AVAILABLE", frozenset(TABLE))
    assert data_parallel(intent(engine="megatron"), EIGHT) is None
    assert data_parallel(intent(engine="megatron", tensor=2, pipeline=2), EIGHT) == 2
    assert data_parallel(intent(engine="megatron", tensor=3, pipeline=1), EIGHT) is None
