"""What gradients are reduced in, and that the plan's time knows it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.making import recipe
from toolkit.plan.cost.workload import workload_of
from toolkit.plan.planner import explore
from toolkit.plan.search import Search

GPUS = {"cluster__gpu": "h100-80gb", "cluster__nodes": 2, "training__precision": "bf16"}


def explored(**changes: Any) -> Search:
    return explore(recipe(**GPUS | {"training__global_batch_size": 16} | changes))


def reduced_in(found: Search) -> float | None:
    return workload_of(found.job, found.best.pair).reduce_bytes


@pytest.mark.parametrize(("stated", "nbytes"), [("bf16", 2), ("fp32", 4), (None, None)])
def test_a_file_of_ones_own_states_it(
    stated: str | None, nbytes: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "own.json"
    settings = {} if stated is None else {"communication_data_type": stated}
    file.write_text(json.dumps(settings))
    zero = {"stage": 2, "config": str(file)}
    found = explored(parallel__engine="deepspeed", parallel__model="hf", parallel__zero=zero)
    assert reduced_in(found) == nbytes
    other = explored(
        parallel__engine="deepspeed", parallel__model="hf", parallel__zero={"stage": 2}
    )
    assert (found.best.step_s < other.best.step_s) == (nbytes == 2)


@pytest.mark.parametrize("engine", ["megatron", "fsdp", "deepspeed"])
def test_every_engine_reduces_fp16_in_fp32(engine: str) -> None:
    """megatron-core's `grad_reduce_in_fp32` is always on, so fp16 saves no traffic."""
    half = {"cluster__gpu": "v100-32gb", "training__precision": "fp16"}
    found = explored(parallel__engine=engine, **half)
    assert reduced_in(found) is None, "4 bytes"
