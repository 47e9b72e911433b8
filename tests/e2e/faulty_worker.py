"""launch/train.py with a fault: DMT_TEST_FAULT=nan@RANK,STEP or flip@RANK,STEP.

`nan` spoils what one layer of that rank computes in that step; `flip` flips one bit of one
weight of that rank after it.
"""

import math
import os
import runpy
from pathlib import Path
from typing import Any

import torch

from toolkit.train import stages

ROOT = Path(__file__).parents[2]
FLIPPED = "model.layers.1.mlp.up_proj.weight"
_build_engine = stages.build_engine


def build_engine(name: str, setup: Any) -> Any:
    """The engine of a setup; on the rank of the fault, a faulty one."""
    engine: Any = _build_engine(name, setup)
    fault, place = os.environ["DMT_TEST_FAULT"].split("@")
    rank, at_step = map(int, place.split(","))
    if rank == setup.ranks.rank:
        _spoil(engine, fault, at_step)
    return engine


def _spoil(engine: Any, fault: str, at_step: int) -> None:
    train_step, step = engine.train_step, 0

    def nan(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * math.nan if fault == "nan" and step == at_step else output

    def spoiled(*arguments: Any) -> Any:
        nonlocal step
        step += 1
        result = train_step(*arguments)
        if fault == "flip" and step == at_step:
            weight = dict(engine.model.named_parameters())[FLIPPED]
            weight.data.view(torch.int32)[3, 5] ^= 1 << 20
        return result

    engine.model.model.norm.register_forward_hook(nan)
    engine.train_step = spoiled


if __name__ == "__main__":
    stages.build_engine = build_engine
    runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="__main__")
