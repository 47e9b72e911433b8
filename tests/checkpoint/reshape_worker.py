"""Run by every rank of test_reshape.py: write checkpoints in layouts, or read them in others.

python -m tests.checkpoint.reshape_worker save|load FOLDER CASES_JSON [SOURCES_JSON]
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.engines.parity_worker import (
    SEED,
    Case,
    global_batches,
    micro_batches,
    new_engine,
    read_state,
    unmasked,
    write_state,
)
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import QUANTITIES, whole_block
from toolkit.checkpoint.store import folder_name
from toolkit.engines.base import Engine
from toolkit.engines.distributed import Ranks, end_process, join, leave
from toolkit.plan.layout import Layout

SAVED_AT = 3
FURTHER = 10


def steps(
    engine: Engine, layout: Layout, ranks: Ranks, first: int, last: int
) -> dict[str, list[float]]:
    """Train steps [first, last); loss and gradient norm of each."""
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step, (inputs, labels) in enumerate(global_batches(last)):
        if step < first:
            continue
        torch.manual_seed(step)
        batches = micro_batches(inputs, labels, ranks, layout)
        result = engine.train_step(batches, unmasked(labels), 1e-3)
        found["loss"].append(result.loss)
        found["grad_norm"].append(result.grad_norm)
    return found


def save(folder: Path, name: str, case: Case, ranks: Ranks) -> dict[str, Any]:
    """Train a little, save, and go on: what every continuation is compared with."""
    engine, layout = new_engine(case, ranks, SEED)
    steps(engine, layout, ranks, 0, SAVED_AT)
    write_state(case, ranks, engine, SAVED_AT, folder / name)
    unbroken = steps(engine, layout, ranks, SAVED_AT, SAVED_AT + FURTHER)
    engine.close()
    return unbroken


def load(folder: Path, name: str, case: Case, ranks: Ranks, source: str) -> dict[str, Any]:
    """Continue the checkpoint `source` in the layout `case`."""
    checkpoint = folder / source / folder_name(SAVED_AT)
    engine, layout = read_state(case, ranks, checkpoint, SEED + 1)
    again = write_state(case, ranks, engine, SAVED_AT, folder / f"{source}-in-{name}")
    different = differences(checkpoint, again) if ranks.rank == 0 else []
    continued = steps(engine, layout, ranks, SAVED_AT, SAVED_AT + FURTHER)
    engine.close()
    return {**continued, "different": different}


def differences(one: Path, other: Path) -> list[str]:
    """Tensors of the state that are not equal to the bit."""
    a, b = SavedState(one), SavedState(other)
    if a.shapes != b.shapes:
        return [f"tensors {sorted(set(a.shapes) ^ set(b.shapes))}"]
    return [
        f"{quantity} of {name}"
        for name, shape in a.shapes.items()
        for quantity in QUANTITIES
        if not torch.equal(
            a.read(quantity, whole_block(name, shape)),
            b.read(quantity, whole_block(name, shape)),
        )
    ]


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    cases = {name: Case(**case) for name, case in json.loads(sys.argv[3]).items()}
    ranks = join()
    if mode == "save":
        results = {name: save(folder, name, case, ranks) for name, case in cases.items()}
    else:
        results = {
            f"{source} in {name}": load(folder, name, cases[name], ranks, source)
            for source, name in json.loads(sys.argv[4])
        }
    leave()
    if ranks.rank == 0:
        print("RESULTS " + json.dumps(results))
    end_process(0)


if __name__ == "__main__":
    main()
