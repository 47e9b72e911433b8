"""What every rank of test_limits.py does."""

import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.engines.parity_worker import (
    SEED,
    Case,
    first_batch,
    new_engine,
)
from toolkit.engines.distributed import Ranks, join, limit_collectives


def limits(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Seconds that a collective may take, of each group when `case`'s engine is built and the
    limit is set, and of the group that is left out; megatron-core's models that are left when
    the engine is closed after a step."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    engine, layout = new_engine(case, ranks, SEED)
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
