"""A rehearsal worker that fails in its second step; the other ranks wait for it for ever."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from toolkit.rehearse import small_run, worker
from toolkit.rehearse.comparison import read_record


def build_engine(name: str, setup: Any) -> Any:
    """The engine, with rank 1 out of step."""
    engine: Any = _build_engine(name, setup)
    train_step, steps = engine.train_step, iter(range(1, 1000))

    def failing(*arguments: Any) -> Any:
        if next(steps) == 2:
            if os.environ["RANK"] == "1":
                while not read_record(Path(sys.argv[1])).loss:
                    time.sleep(0.01)
                raise RuntimeError("the disk is full\nand more about it")
            time.sleep(3600)
        return train_step(*arguments)

    engine.train_step = failing
    return engine


if __name__ == "__main__":
    _build_engine = small_run.build_engine
    small_run.build_engine = build_engine
    worker.main()
