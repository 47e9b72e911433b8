"""What every rank of test_replica_check.py does: compare replicas before and after a flip."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.engines.cases import (
    Case,
    first_batch,
    new_engine,
)
from toolkit.engines.distributed import Ranks, join, leave
from toolkit.errors import DmtError
from toolkit.train.replica_check import ReplicaCheck


def compare(case: Case, ranks: Ranks, flipped: int) -> dict[str, Any]:
    """What the check says of equal replicas, and which error it raises for unequal ones."""
    engine, layout = new_engine(case, ranks)
    batches, count = first_batch(ranks, layout)
    engine.train_step(batches, count, 1e-3)
    check = ReplicaCheck(engine, layout, agreed_step=0, distrust=str)
    said = [check.check(1), check.check(2)]
    if ranks.rank == flipped and (weights := list(engine.replicated_weights())):
        _, weight = weights[-1]
        weight.data.view(-1).view(torch.int32)[-1] ^= 1
    try:
        check.check(3)
        error = None
    except DmtError as found:
        error = f"{type(found).__name__}: {found}"
    engine.close()
    return {"said": said, "error": error}


def compare_all(cases: Sequence[Case], flipped: int) -> list[dict[str, Any]]:
    """What `compare` finds on this rank for each case; a bit flips on rank `flipped`."""
    ranks = join()
    found = [compare(case, ranks, flipped) for case in cases]
    leave()
    return found
