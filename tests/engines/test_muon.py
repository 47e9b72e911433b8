"""`optimizer.name: muon`: its rule is torch's, and its state moves between layouts. Every
layout trains with it in test_pairs.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.reshape_worker import SAVED_AT
from tests.checkpoint.reshaping import around, write_all
from tests.checkpoint.reshaping import check as check_reshape
from tests.engines.muon_worker import orthogonalized
from tests.engines.owner_cases import (
    deepspeed,
    small,
)
from tests.engines.parity_worker import Case
from tests.forked import run_ranks
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.store import folder_name
from toolkit.checkpoint.verify import coverage_problems
from toolkit.engines.muon import Muon, newton_schulz
from toolkit.optimizers.muon import MuonSection
from toolkit.recipe.schema import OptimizerSection

RATE = 7e-5
"""The Newton-Schulz iteration rounds to bf16: another last digit of a gradient now and then
flips a bit there. At 1e-3 twenty steps make 4e-5 of that, with torch's own optimizer, too."""
OTHER = {"momentum": 0.8, "nesterov": False, "ns_steps": 3, "adjust_lr": "original"}
GROUPS = ({"parameters": ["*.mlp.*"], "lr_mult": 0.5, "wd_mult": 2.0},)


def muon(case: Case, **settings: Any) -> Case:
    optimizer = {"name": "muon", "learning_rate": RATE} | (
        {"muon": settings} if settings else {}
    )
    return replace(case, optimizer=optimizer)


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (128, 32)])
def test_the_iteration_is_torchs_to_the_bit(shape: tuple[int, int]) -> None:
    """Which torch itself has under a private name, with other arguments in other versions."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = gradient
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    own = MuonSection(adjust_lr="original")
    rate = Muon(OptimizerSection(name="muon", learning_rate=1.0, muon=own))
    expected = torch.zeros(shape).add_(newton_schulz(gradient, 5), alpha=-rate.rate(shape))
    assert torch.equal(weight, expected)


def test_rectangles() -> None:
    """Several exchanges; a copy on both ranks, turned rectangles, and a rank without any."""
    for rank in run_ranks(orthogonalized, 2):
        assert rank.pop("rounds") > 1
        assert rank.keys() == {"split", "turned", "copied", "one"}
        assert max(rank.values()) < 1e-6


@pytest.mark.slow
def test_reshape(tmp_path: Path) -> None:
    """Saved in each layout, continued in another one with the same losses, and in itself to
    the bit; the weights and moments that it saves again are the same to the bit."""
    layouts = {
        "tp2": (2, muon(small(tensor=2))),
        "zero2": (2, muon(deepspeed(2))),
        "pp2": (2, muon(small(pipeline=2))),
        "fsdp3": (2, muon(Case("fsdp", 2, 3))),
        "zero3": (2, muon(deepspeed(3))),
    }
    itself = [(name, name) for name in layouts]
    unbroken = write_all(tmp_path, layouts)
    state = SavedState(tmp_path / "tp2" / folder_name(SAVED_AT))
    assert state.quantities("model.layers.1.mlp.up_proj.weight") == ["weight", "exp_avg"]
    assert [*coverage_problems(state, optimizer="muon")] == []
    assert "exp_avg_sq of model.layers." in next(coverage_problems(state))
    check_reshape(tmp_path, unbroken, layouts, [*around(layouts), *itself])
