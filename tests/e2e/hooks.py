"""Faults and delays of ranks in real runs: DMT_TEST_HOOK names a function of this file.

tests/warm.py calls it in every process that has the variable, before its program begins.
"""

import math
import os
import sys
import time
from typing import Any

HOOK = "DMT_TEST_HOOK"
FLIPPED = "model.layers.1.mlp.up_proj.weight"


def hooked(name: str, **more: str) -> dict[str, str]:
    """The environment of a command whose processes have the hook."""
    return {HOOK: name, **more}


def faulty_engine() -> None:
    """DMT_TEST_FAULT=nan@RANK,STEP spoils what one layer of that rank computes in that step;
    flip@RANK,STEP flips one bit of one weight of that rank after it."""
    from toolkit.train import stages

    build = stages.build_engine

    def build_engine(name: str, setup: Any) -> Any:
        engine: Any = build(name, setup)
        fault, place = os.environ["DMT_TEST_FAULT"].split("@")
        rank, at_step = map(int, place.split(","))
        if rank == setup.ranks.rank:
            _spoil(engine, fault, at_step)
        return engine

    stages.build_engine = build_engine


def _spoil(engine: Any, fault: str, at_step: int) -> None:
    import torch

    train_step, step = engine.train_step, 0

    def nan(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * math.nan if fault == "nan" and step == at_step else output

    def spoiled(*arguments: Any) -> Any:
        nonlocal step
        step += 1
        result = train_step(*arguments)
        if fault == "flip" and step == at_step:
            weight = dict(engine.replicated_weights())[FLIPPED]
            weight.view(torch.int32)[3, 5] ^= 1 << 20
        return result

    engine.model.model.norm.register_forward_hook(nan)
    engine.train_step = spoiled


def logged_samples() -> None:
    """Each rank writes what its steps train on to `samples/rank-N.jsonl` of the run."""
    if "RANK" not in os.environ:
        return
    from toolkit.run import jsonl
    from toolkit.train.loop import TrainingRun

    build = TrainingRun.__init__

    def built(self: Any, start: Any, engine: Any, *more: Any) -> None:
        build(self, start, engine, *more)
        rank, train_step = start.ranks.rank, engine.train_step
        file = start.directory.path / "samples" / f"rank-{rank}.jsonl"
        file.parent.mkdir(exist_ok=True)
        data_rank = start.plan.layout.data_rank(rank)

        def logged(batches: Any, *others: Any) -> Any:
            result = train_step(batches, *others)
            samples = [sample for batch in batches for sample in batch.samples]
            step = self.progress.step + 1
            jsonl.append(file, {"step": step, "data_rank": data_rank, "samples": samples})
            return result

        engine.train_step = logged

    TrainingRun.__init__ = built  # type: ignore[method-assign]


def slow_rank() -> None:
    """Rank 1 sleeps twice as long for a row as rank 0, and for a product."""
    if "RANK" not in os.environ:
        return
    logged_samples()
    from transformers.models.llama.modeling_llama import LlamaModel

    from toolkit.train import balance

    row_s = 0.01 * (1 + int(os.environ["RANK"]))
    forward, product = LlamaModel.forward, balance.product

    def by_row(self: Any, input_ids: Any, *more: Any, **named: Any) -> Any:
        time.sleep(row_s * len(input_ids))
        return forward(self, input_ids, *more, **named)

    def slow_product(*factors: Any) -> None:
        time.sleep(2 * row_s)
        product(*factors)

    LlamaModel.forward, balance.product = by_row, slow_product


def warm_job() -> None:
    """Jobs that a launcher writes start DMT by DMT_TEST_PYTHON."""
    sys.executable = os.environ["DMT_TEST_PYTHON"]


def failing_step() -> None:
    """A step raises an error whose text holds a secret."""
    if "RANK" not in os.environ:
        return
    import torch

    def step(*_: object, **__: object) -> None:
        raise RuntimeError("cannot log in with " + os.environ["MY_PASSWORD"])

    torch.optim.AdamW.step = step  # type: ignore[method-assign,assignment]
