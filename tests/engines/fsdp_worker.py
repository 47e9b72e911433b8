"""What every rank of test_fsdp.py does: look into the engine while it trains."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engines.parity_worker import (
    SEED,
    Case,
    first_batch,
    new_engine,
    recipe,
)
from toolkit.engines.distributed import Ranks
from toolkit.engines.fsdp.engine import FsdpEngine
from toolkit.models import huggingface as hf

COLLECTIVES = {
    "_allgather_base_": "gathered",
    "_reduce_scatter_base_": "reduced",
    "allreduce_": "summed",
}


class Counted(TorchDispatchMode):
    """How often parameters are gathered, and gradients reduced and, over copies of the shards,
    summed, by type of what is sent. Losses and norms are summed in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Counter[str]] = {w: Counter() for w in COLLECTIVES.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if word := COLLECTIVES.get(func.overloadpacket.__name__):
            sent = args[0][0] if word == "summed" else args[0]
            if sent.dtype != torch.float64:
                self.found[word][str(sent.dtype)] += 1
        return func(*args, **(kwargs or {}))


def sharded(engine: FsdpEngine) -> bool:
    """Is nothing gathered?"""
    return all(isinstance(p, DTensor) for p in engine.model.parameters())


def look(case: Case, ranks: Ranks) -> dict[str, Any]:
    """One step and one evaluation of a case."""
    with Counted() as while_built:
        engine, layout = new_engine(case, ranks, SEED)
    assert isinstance(engine, FsdpEngine)
    config = hf.build_config(recipe(case, ranks.world).model)
    reference = hf.empty_model(config, torch.device("cpu"))
    buffers = zip(engine.model.buffers(), reference.buffers(), strict=True)
    batches, count = first_batch(ranks, layout)
    with Counted() as in_step:
        engine.train_step(batches, count, 1e-3)
    after_step = sharded(engine)
    with Counted() as in_evaluation:
        engine.evaluate(batches)
    held = [shard.get("weight").numel() for shard in engine.state()]
    saved = sum(s.get("weight").numel() for s in engine.state() if s.saved_here)
    moments = [shard.get("exp_avg").dtype for shard in engine.state()]
    result = {
        "while_built": while_built.found,
        "in_step": in_step.found,
        "in_evaluation": in_evaluation.found,
        "sharded": [after_step, sharded(engine)],
        "buffers": all(torch.equal(a, b) for a, b in buffers),
        "held": [None] * ranks.world,
        "saved": [None] * ranks.world,
        "whole": sum(p.numel() for p in reference.parameters()),
        "moments": sorted({str(dtype) for dtype in moments}),
    }
    dist.all_gather_object(result["held"], sum(held))
    dist.all_gather_object(result["saved"], saved)
    engine.close()
    return result
