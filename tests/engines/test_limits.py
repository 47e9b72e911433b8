"""How long a collective may take is the recipe's decision, in every group of every engine."""

import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.engines.cases import MIXTRAL, Case, alone, first_batch, megatron, new_engine
from tests.forked import run_ranks
from tests.processes import HANG_S
from toolkit.engines.distributed import Ranks, join, limit_collectives
from toolkit.train.watchdog import collective_limit

CASES = [
    Case("ddp", 2),
    *(Case("deepspeed", 2, stage=stage) for stage in (0, 2, 3)),
    megatron(tensor=2),
    megatron(pipeline=2),
    megatron(stage=1, recompute="full"),
    megatron(expert=2, family=MIXTRAL),
    Case("fsdp", 2, stage=3),
]


def limits(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Seconds that a collective may take, of each group when `case`'s engine is built and the
    limit is set, and of the group that is left out; megatron-core's models that are left when
    the engine is closed after a step."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    engine, layout = new_engine(case, ranks)
    limit_collectives(timedelta(hours=2), but=patient)
    found = {group: _limit_s(group) for group in distributed_c10d._world.pg_map}
    result = {"patient": found.pop(patient), "others": list(found.values())}
    batches, count = first_batch(ranks, layout)
    engine.train_step(batches, count, 1e-3)
    replicas = [weakref.ref(one) for one in getattr(engine, "replicas", [])]
    engine.close()
    del engine
    gc.collect()
    result["kept"] = sum(replica() is not None for replica in replicas)
    dist.destroy_process_group(patient)
    return result


def wait_for_a_rank_that_does_not_come(limit_s: float) -> float:
    """On rank 0: seconds until a collective of a group made before the limit has failed."""
    ranks = join()
    patient = dist.new_group(backend="gloo")
    group = dist.new_group(backend="gloo")
    dist.barrier(group=group)
    limit_collectives(timedelta(seconds=limit_s), but=patient)
    began = time.monotonic()
    if ranks.rank == 0:
        try:
            dist.barrier(group=group)
        except RuntimeError as error:
            assert "Timed out" in str(error), error
    waited_s = time.monotonic() - began
    dist.barrier(group=patient)
    return waited_s


def _limit_s(group: dist.ProcessGroup) -> float:
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit.total_seconds()


@pytest.mark.slow
@pytest.mark.quick
def test_every_group_of_every_engine_has_the_limit() -> None:
    """And a closed engine leaves no model: each has groups, whose threads poll."""
    found = run_ranks(alone, 2, limits, CASES)
    for rank in found:
        for case in CASES:
            assert rank[case.name]["patient"] == 24 * 3600, case.name
            assert set(rank[case.name]["others"]) == {2 * 3600}, case.name
            assert rank[case.name]["kept"] == 0, case.name


@pytest.mark.slow
@pytest.mark.quick
def test_a_collective_is_given_up_when_the_limit_is_over() -> None:
    waited_s, _ = run_ranks(wait_for_a_rank_that_does_not_come, 2, 1.0)
    assert 1.0 <= waited_s < HANG_S


@pytest.mark.parametrize("limit_s", [5.0, 1800.0, 3600.0])
def test_our_limit_comes_first(limit_s: float) -> None:
    longest_way_s = 2 * (3 * limit_s) + 20  # in the first step
    assert collective_limit(limit_s).total_seconds() > longest_way_s
