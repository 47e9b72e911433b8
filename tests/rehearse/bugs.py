"""A rehearsal worker whose engine has the bug that DMT_TEST_BUG names.

python -m tests.rehearse.bugs RUN_DIR
"""

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from toolkit.rehearse import worker
from toolkit.rehearse.comparison import read_record

STEP = 2
"""In which a reduction is left out, or a rank fails."""
BUG = "DMT_TEST_BUG"


def batched_p2p(name: str, setup: Any) -> Any:
    """Pipeline stages talk through batched messages, megatron-core's default.

    With two stages and virtual stages, the previous rank is also the next one, and gloo
    matches them in the wrong order: right losses, wrong gradients.
    """
    engine: Any = build_engine(name, setup)
    config = engine.chunks[0].config  # the one that the schedule reads
    assert not config.batch_p2p_comm, "the product's own setting"
    config.batch_p2p_comm, config.overlap_p2p_comm = True, False
    return engine


def no_weight_decay(name: str, setup: Any) -> Any:
    recipe = setup.recipe.with_values({"optimizer.weight_decay": 0.0})
    return build_engine(name, replace(setup, recipe=recipe))


def dropped_reduction(name: str, setup: Any) -> Any:
    """One gradient all-reduce is left out, in step STEP only."""
    engine: Any = build_engine(name, setup)
    train_step, steps = engine.train_step, iter(range(1, 1000))

    def buggy(*arguments: Any) -> Any:
        with ExitStack() as bug:
            if next(steps) == STEP:
                _without_reduction(engine, bug)
            return train_step(*arguments)

    engine.train_step = buggy
    return engine


def _without_reduction(engine: Any, bug: ExitStack) -> None:
    def nothing(*_: Any, **__: Any) -> None: ...

    kind = type(engine).__name__
    if kind == "DdpEngine":
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        unreduced = SimpleNamespace(**{**vars(_fsdp_collectives.dist), "all_reduce": nothing})
        bug.enter_context(patch.object(_fsdp_collectives, "dist", unreduced))
    elif kind == "DeepSpeedEngine":  # stages 1 and 2: averages a bucket over the ranks
        bug.enter_context(patch.object(engine.optimizer, "average_tensor", nothing))
    else:  # sequence parallel: the norms' in a tensor group
        from megatron.core.distributed import finalize_model_grads

        reduction = {"_allreduce_non_tensor_model_parallel_grads": nothing}
        bug.enter_context(patch.dict(finalize_model_grads.__globals__, reduction))


def failing(name: str, setup: Any) -> Any:
    """Rank 1 fails in step STEP; the other waits for it for ever."""
    engine: Any = build_engine(name, setup)
    train_step, steps = engine.train_step, iter(range(1, 1000))

    def fail(*arguments: Any) -> Any:
        if next(steps) == STEP:
            if os.environ["RANK"] == "1":
                while not read_record(Path(sys.argv[1])).loss:
                    time.sleep(0.01)
                raise RuntimeError("the disk is full\nand more about it")
            time.sleep(3600)
        return train_step(*arguments)

    engine.train_step = fail
    return engine


if __name__ == "__main__":
    build_engine = worker.build_engine
    worker.build_engine = globals()[os.environ[BUG]]
    worker.main()
