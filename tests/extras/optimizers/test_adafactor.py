"""`optimizer.name: adafactor`: its rule is transformers', and its state moves between layouts;
every layout trains with it in tests/engines/test_pairs.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as Transformers

from tests.checkpoint.reshape_worker import SAVED_AT
from tests.checkpoint.reshaping import around, write_all
from tests.checkpoint.reshaping import check as check_reshape
from tests.engines.cases import MIXTRAL
from tests.engines.owner_cases import (
    deepspeed,
    small,
    zeros,
)
from tests.engines.parity_worker import Case
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.store import folder_name
from toolkit.checkpoint.verify import coverage_problems
from toolkit.extras.optimizers.adafactor import ADAFACTOR, AdafactorSection
from toolkit.extras.optimizers.adafactor_update import Adafactor
from toolkit.recipe.schema import OptimizerSection

RATE = 1e-3
OTHER = {"decay": 0.6, "eps": 1e-12, "clip": 2.0}


def adafactor(case: Case, **settings: Any) -> Case:
    optimizer = {"name": "adafactor", "learning_rate": RATE}
    optimizer |= {"adafactor": settings} if settings else {}
    return replace(case, optimizer=optimizer)


@pytest.mark.parametrize("shape", [(7, 5), (9,)])
def test_the_rule(shape: tuple[int, ...]) -> None:
    own = AdafactorSection(**OTHER)
    rule = Adafactor(OptimizerSection(name="adafactor", learning_rate=1.0, adafactor=own))
    states = zeros(ADAFACTOR, shape)
    weight = nn.Parameter(torch.zeros(shape))
    theirs = Transformers(
        [weight], lr=1.0, scale_parameter=False, relative_step=False, decay_rate=-0.6,
        eps=(1e-12, 0.0), clip_threshold=2.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 5):
        weight.data.zero_()
        weight.grad = torch.randn(shape, generator=generator) * step**3
        theirs.step()
        update = rule.update(weight.grad, states, step)
        assert torch.allclose(update, -weight, rtol=1e-5)
        assert update.square().mean().sqrt() <= 2.0 + 1e-5
    for name, state in states.items():
        assert torch.allclose(state, theirs.state[weight][name], rtol=1e-6), name


@pytest.mark.slow
def test_reshape(tmp_path: Path) -> None:
    """Saved in each layout, continued in another one with the same losses, and in itself to
    the bit; the weights and factors that it saves again are the same to the bit."""
    layouts = {
        "tp2": (2, adafactor(small(tensor=2))),
        "zero2": (2, adafactor(deepspeed(2))),
        "pp2": (2, adafactor(small(pipeline=2))),
        "distributed": (2, adafactor(small(stage=1))),
        "fsdp3": (2, adafactor(Case("fsdp", 2, 3))),
        "zero3": (2, adafactor(deepspeed(3))),
    }
    itself = [(name, name) for name in layouts]
    unbroken = write_all(tmp_path, layouts)
    state = SavedState(tmp_path / "tp2" / folder_name(SAVED_AT))
    assert state.quantities("model.layers.1.mlp.up_proj.weight") == [
        "weight", "exp_avg_sq_row", "exp_avg_sq_col",
    ]  # fmt: skip
    assert state.quantities("model.norm.weight") == ["weight", "exp_avg_sq"]
    assert [*coverage_problems(state, optimizer="adafactor")] == []
    assert "which adamw does not keep" in next(coverage_problems(state))
    check_reshape(tmp_path, unbroken, layouts, [*around(layouts), *itself])


@pytest.mark.soak
def test_reshape_experts(tmp_path: Path) -> None:
    layouts = {
        "ep2": (2, adafactor(small(expert=2, family=MIXTRAL))),
        "zero3": (2, adafactor(deepspeed(3, family=MIXTRAL))),
        "tp2": (2, adafactor(small(tensor=2, sequence=True, family=MIXTRAL))),
    }
    itself = [(name, name) for name in layouts]
    unbroken = write_all(tmp_path, layouts)
    check_reshape(tmp_path, unbroken, layouts, [*around(layouts), *itself])
