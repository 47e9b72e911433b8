"""A rehearsal worker with a bug: one gradient all-reduce is left out, in step STEP only."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from toolkit.engines.base import StepResult
from toolkit.rehearse import small_run, worker

STEP = 2


def _nothing(*arguments: Any, **options: Any) -> None:
    """Stands for the reduction that is forgotten."""


def _ddp(engine: Any, bug: ExitStack) -> None:
    unreduced = engine.replica.no_sync
    bug.enter_context(patch.object(engine, "accumulating", lambda **_: unreduced()))


def _deepspeed(engine: Any, bug: ExitStack) -> None:
    """Stages 1 and 2: what averages a bucket over the ranks."""
    bug.enter_context(patch.object(engine.optimizer, "average_tensor", _nothing))


def _megatron(engine: Any, bug: ExitStack) -> None:
    """Over the data-parallel ranks; under sequence parallel, the norms' in a tensor group."""
    if engine.setup.layout.sequence_parallel:
        from megatron.core.distributed import finalize_model_grads

        reduction = {"_allreduce_non_tensor_model_parallel_grads": _nothing}
        bug.enter_context(patch.dict(finalize_model_grads.__globals__, reduction))
    for replica in engine.replicas:
        for group in replica.bucket_groups:
            for part in ("start_grad_sync", "finish_grad_sync"):
                bug.enter_context(patch.object(group, part, _nothing))


BUGS = {"DdpEngine": _ddp, "DeepSpeedEngine": _deepspeed, "MegatronEngine": _megatron}


def build_engine(name: str, setup: Any) -> Any:
    """The engine, with the bug in its step STEP."""
    engine: Any = _build_engine(name, setup)
    train_step, steps = engine.train_step, iter(range(1, 1000))

    def buggy(*arguments: Any) -> StepResult:
        with ExitStack() as bug:
            if next(steps) == STEP:
                BUGS[type(engine).__name__](engine, bug)
            result: StepResult = train_step(*arguments)
        return result

    engine.train_step = buggy
    return engine


if __name__ == "__main__":
    _build_engine = small_run.build_engine
    small_run.build_engine = build_engine
    worker.main()
