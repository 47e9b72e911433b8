"""What every rank of test_reshape.py does: write checkpoints in layouts, read them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engines.parity_worker import (
    SEED,
    Case,
    curves,
    new_engine,
    read_state,
    steps,
    write_state,
)
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_quantity
from toolkit.checkpoint.store import folder_name
from toolkit.checkpoint.verify import verify
from toolkit.engines.distributed import Ranks, join, leave

SAVED_AT = 2
FURTHER = 3


def save(folder: Path, name: str, case: Case, ranks: Ranks) -> dict[str, Any]:
    """Train a little, save, and go on: what every continuation is compared with."""
    engine, layout = new_engine(case, ranks, SEED)
    steps(engine, layout, ranks, 0, SAVED_AT, case.learning_rate)
    saved = write_state(case, ranks, engine, SAVED_AT, folder / name)
    assert ranks.rank or verify(saved).problems == ()
    unbroken = steps(engine, layout, ranks, SAVED_AT, SAVED_AT + FURTHER, case.learning_rate)
    engine.close()
    return curves(unbroken)


def load(folder: Path, name: str, case: Case, ranks: Ranks, source: str) -> dict[str, Any]:
    """Continue the checkpoint `source` in the layout `case`."""
    checkpoint = folder / source / folder_name(SAVED_AT)
    engine, layout = read_state(case, ranks, checkpoint, SEED + 1)
    again = write_state(case, ranks, engine, SAVED_AT, folder / f"{source}-in-{name}")
    different = differences(checkpoint, again) if ranks.rank == 0 else []
    continued = steps(engine, layout, ranks, SAVED_AT, SAVED_AT + FURTHER, case.learning_rate)
    engine.close()
    return {**curves(continued), "different": different}


def differences(one: Path, other: Path) -> list[str]:
    """Tensors of the state that are not equal to the bit."""
    a, b = SavedState(one), SavedState(other)
    if a.shapes != b.shapes:
        return [f"tensors {sorted(set(a.shapes) ^ set(b.shapes))}"]
    return [
        f"{quantity} of {name}"
        for name, shape in a.shapes.items()
        for quantity in {*a.quantities(name), *b.quantities(name)}
        if not torch.equal(
            a.read(quantity, whole_quantity(quantity, name, shape)),
            b.read(quantity, whole_quantity(quantity, name, shape)),
        )
    ]


def save_all(folder: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    """A checkpoint of each case; how each went on unbroken."""
    ranks = join()
    found = {name: save(folder, name, case, ranks) for name, case in cases.items()}
    leave()
    return found


def load_all(
    folder: Path, cases: Mapping[str, Case], pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    """Continue the first layout of each pair in the second, if that is one of the cases."""
    ranks = join()
    found = {
        (source, target): load(folder, target, cases[target], ranks, source)
        for source, target in pairs
        if target in cases
    }
    leave()
    return found
