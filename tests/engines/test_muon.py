"""`optimizer.name: muon`: in every layout the run of transformers with `torch.optim.Muon` and
`torch.optim.AdamW` in one process."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.reshape_worker import SAVED_AT
from tests.checkpoint.reshaping import around, write_all
from tests.checkpoint.reshaping import check as check_reshape
from tests.engines.cases import MIXTRAL
from tests.engines.muon_worker import orthogonalized
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
)
from tests.engines.parity_worker import Case, plain_loop
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


class Both(Parts):
    """torch's Muon and AdamW; experts that transformers stacks are matrices each. `grouped`: as
    with `GROUPS`."""

    def __init__(self, model: nn.Module, *, grouped: bool = False, **settings: Any) -> None:
        super().__init__()
        matrices, others, halved = [], [], []
        for name, parameter in model.named_parameters():
            if grouped and "mlp" in name:
                halved.append(parameter)
            elif parameter.requires_grad and parameter.ndim == 3:
                matrices += self.experts(name, parameter)
            elif parameter.requires_grad:
                layer = ".layers." in name or ".h." in name
                (matrices if layer and parameter.ndim == 2 else others).append(parameter)
        adjust = settings.pop("adjust_lr", "match_rms_adamw")
        slow = {"params": halved, "lr": 0.5 * RATE, "weight_decay": 0.2}
        muon = torch.optim.Muon(
            [{"params": matrices}, *([slow] if halved else [])],
            lr=RATE, weight_decay=0.1, adjust_lr_fn=adjust, **settings,
        )  # fmt: skip
        groups = [
            {"params": [p for p in others if p.ndim > 1]},
            {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(
            groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
        self.optimizers = [muon, adamw]


@cache
def reference(family: Any, settings: Any, freeze: tuple[str, ...], grouped: bool) -> Any:
    model = plain_model(family, freeze)
    optimizer: Any = Both(model, grouped=grouped, **dict(settings))
    return plain_loop(model, optimizer)


def reference_of(case: Case) -> Any:
    settings = tuple(case.optimizer.get("muon", {}).items())
    return reference(tuple(case.family.items()), settings, case.freeze, bool(case.groups))


TWO = [
    muon(Case("ddp", 2)),
    muon(Case("fsdp", 2, 3)),
    *(muon(deepspeed(stage)) for stage in (0, 1, 2, 3)),
    muon(small(tensor=2)),
    muon(small(pipeline=2)),
    muon(small(stage=1)),
    muon(small(expert=2, family=MIXTRAL)),
]
MORE = [
    muon(Case("fsdp", 2, 2, family=MIXTRAL)),
    muon(deepspeed(3, family=MIXTRAL)),
    muon(deepspeed(1), **OTHER),
    muon(small(tensor=2, family=GPT2)),
    muon(small(tensor=2, sequence=True), **OTHER),
    replace(muon(small(pipeline=2)), freeze=BOTTOM),
    replace(muon(deepspeed(3)), freeze=BOTTOM),
    *(
        replace(muon(case), groups=GROUPS)
        for case in (Case("ddp", 2), deepspeed(2), deepspeed(3), small(tensor=2))
    ),
]
FOUR = in_four(muon)
HALF = in_16_bits(muon)


def test_one_process() -> None:
    check([muon(Case("ddp", 8)), muon(Case("ddp", 4), **OTHER)], 1, reference_of)


def test_two_processes() -> None:
    check(TWO, 2, reference_of)


@pytest.mark.soak
def test_more_layouts() -> None:
    check(MORE, 2, reference_of)


@pytest.mark.slow
def test_four_processes() -> None:
    check(FOUR, 4, reference_of)


@pytest.mark.soak
def test_16_bits() -> None:
    check(HALF, 2, reference_of, 3e-2)


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
