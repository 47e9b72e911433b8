"""A rehearsal worker with a bug: its engine forgets the weight decay."""

from dataclasses import replace
from typing import Any

from toolkit.rehearse import small_run, worker


def build_engine(name: str, setup: Any) -> Any:
    """The engine of a setup without weight decay."""
    optimizer = setup.optimizer.model_copy(update={"weight_decay": 0.0})
    return _build_engine(name, replace(setup, optimizer=optimizer))


if __name__ == "__main__":
    _build_engine = small_run.build_engine
    small_run.build_engine = build_engine
    worker.main()
