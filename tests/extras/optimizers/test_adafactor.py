"""`optimizer.name: adafactor`: in every layout the run of transformers with its own
Adafactor in one process."""

from dataclasses import replace
from functools import cache
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
    BOTTOM,
    GPT2,
    Parts,
    check,
    deepspeed,
    in_16_bits,
    in_four,
    plain_model,
    small,
    zeros,
)
from tests.engines.parity_worker import Case, plain_loop
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


class Factored(Parts):
    """transformers' Adafactor; experts that it stacks are matrices each."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        decayed, others = [], []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.ndim == 3:
                decayed += self.experts(name, parameter)
            elif parameter.requires_grad:
                (decayed if parameter.ndim == 2 else others).append(parameter)
        optimizer = Transformers(
            [
                {"params": decayed, "weight_decay": 0.1},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=RATE, scale_parameter=False, relative_step=False,
            decay_rate=-settings.get("decay", 0.8), eps=(settings.get("eps", 1e-30), 0.0),
            clip_threshold=settings.get("clip", 1.0),
        )  # fmt: skip
        self.optimizers = [optimizer]


@cache
def reference(family: Any, settings: Any, freeze: tuple[str, ...]) -> Any:
    model = plain_model(family, freeze)
    return plain_loop(model, Factored(model, **dict(settings)))  # type: ignore[arg-type]


def reference_of(case: Case) -> Any:
    settings = tuple(case.optimizer.get("adafactor", {}).items())
    return reference(tuple(case.family.items()), settings, case.freeze)


TWO = [
    adafactor(Case("ddp", 2)),
    adafactor(Case("fsdp", 2, 2)),
    adafactor(Case("fsdp", 2, 3)),
    *(adafactor(deepspeed(stage)) for stage in (0, 1, 2, 3)),
    adafactor(small(tensor=2)),
    adafactor(small(pipeline=2)),
    adafactor(small(stage=1)),
    adafactor(small(expert=2, family=MIXTRAL)),
]
MORE = [
    adafactor(Case("fsdp", 2, 3, family=MIXTRAL)),
    adafactor(deepspeed(2, family=MIXTRAL), **OTHER),
    # Its key biases have a gradient of rounding errors, of which a tiny eps makes whole steps.
    adafactor(small(tensor=2, family=GPT2), eps=1e-12),
    adafactor(small(tensor=2, sequence=True), **OTHER),
    replace(adafactor(small(pipeline=2)), freeze=BOTTOM),
    replace(adafactor(deepspeed(3)), freeze=BOTTOM),
    replace(adafactor(Case("fsdp", 2, 3)), freeze=BOTTOM),
]
FOUR = in_four(adafactor)
HALF = in_16_bits(adafactor)


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


def test_one_process() -> None:
    check([adafactor(Case("ddp", 8)), adafactor(Case("ddp", 4), **OTHER)], 1, reference_of)


def test_two_processes() -> None:
    check(TWO, 2, reference_of)


@pytest.mark.soak
def test_more_layouts() -> None:
    check(MORE, 2, reference_of)


@pytest.mark.soak
def test_four_processes() -> None:
    check(FOUR, 4, reference_of)


@pytest.mark.soak
def test_16_bits() -> None:
    check(HALF, 2, reference_of, 3e-2)


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
