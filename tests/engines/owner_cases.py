"""What the tests of optimizers share whose updates need whole tensors."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.reshape_worker import SAVED_AT
from tests.checkpoint.reshaping import around, check, write_all
from tests.engines.cases import MIXTRAL, megatron
from tests.engines.parity_worker import Case
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.store import folder_name
from toolkit.optimizers.base import OptimizerKind

# As many layers as the reference.
LAYOUTS = {
    "tp2": megatron(tensor=2, family={}),
    "zero2": Case("deepspeed", 2, 2),
    "pp2": megatron(pipeline=2, family={}),
    "fsdp3": Case("fsdp", 2, 3),
}
EXPERTS = {
    "ep2": megatron(expert=2, family=MIXTRAL),
    "zero3": Case("deepspeed", 2, 3, family=MIXTRAL),
    "tp2": megatron(tensor=2, sequence=True, family=MIXTRAL),
}


def check_reshaped(
    folder: Path, optimizer: dict[str, Any], cases: Mapping[str, Case] = LAYOUTS
) -> SavedState:
    """Saved in each layout, continued in another one with the same losses, and in itself to the
    bit; the states that it saves again are the same to the bit. That of the first layout."""
    layouts = {name: (2, replace(case, optimizer=optimizer)) for name, case in cases.items()}
    itself = [(name, name) for name in layouts]
    check(folder, write_all(folder, layouts), layouts, [*around(layouts), *itself])
    return SavedState(folder / next(iter(layouts)) / folder_name(SAVED_AT))


def zeros(kind: OptimizerKind, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The states of a tensor's owner before the first step."""
    assert kind.whole is not None
    return {
        name: torch.zeros(state.shape(shape), dtype=getattr(torch, state.dtype))
        for name, state in kind.whole.states(shape).items()
    }
