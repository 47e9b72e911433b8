"""`optimizer.groups`: the run of plain transformers and torch's AdamW with groups that are
written by hand. Every layout has groups in test_pairs.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.cases import LAYERS, TOLERANCE, assert_curves, megatron, run
from tests.engines.lora_worker import adapter, look
from tests.engines.lora_worker import reference as lora_reference
from tests.engines.pairs import GROUPS
from tests.engines.parity_worker import (
    Case,
    each_case,
    plain_loop,
    reference_model,
)
from tests.forked import call_ranks

STEPS = 6
RATE = 3e-4
"""At larger ones AdamW makes a difference of 1e-5 of what is rounded otherwise."""


def by_hand(name: str) -> tuple[float, float]:
    """What GROUPS multiply learning rate and weight decay of a parameter by."""
    if name == "model.embed_tokens.weight":
        return 0.25, 0.0
    if name.startswith(("model.layers.0.", "model.layers.1.mlp.")):
        return 0.5, 1.0
    if name.startswith(("model.layers.1.", "model.layers.2.")):
        return 1.5, 40.0
    return (2.0, 1.0) if "norm" in name else (1.0, 1.0)


def plain(
    family: dict[str, Any], multipliers: Callable[[str], tuple[float, float]] = by_hand
) -> dict[str, list[float]]:
    model, _ = reference_model(Case("ddp", 8, family=family))
    groups = []
    for name, parameter in model.named_parameters():
        lr_mult, wd_mult = multipliers(name)
        decay = 0.1 * wd_mult if parameter.ndim > 1 else 0.0
        groups.append({"params": [parameter], "lr": RATE * lr_mult, "weight_decay": decay})
    return plain_loop(model, torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8), STEPS)


@pytest.mark.slow
def test_engines() -> None:
    cases = [
        replace(
            case, family=LAYERS, groups=GROUPS, steps=STEPS, optimizer={"learning_rate": RATE}
        )
        for case in (
            Case("fsdp", 2, stage=3),
            Case("deepspeed", 2, 2),
            megatron(pipeline=2, stage=1),
        )
    ]
    expected = plain(LAYERS)
    ungrouped = plain(LAYERS, lambda _: (1.0, 1.0))
    assert expected["loss"] != pytest.approx(ungrouped["loss"], rel=10 * TOLERANCE)
    for name, result in run(cases, 2).items():
        assert_curves(result, expected, name=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_adapters(tmp_path: Path) -> None:
    """LoRA+ (arXiv:2402.12354): another learning rate for B than for A."""
    groups = ({"parameters": ("*.lora_B.weight",), "lr_mult": 4.0},)
    cases = [
        replace(case, adapter=adapter(), groups=groups, family=LAYERS)
        for case in (
            Case("fsdp", 2, stage=3), megatron(tensor=2),
        )
    ]  # fmt: skip
    found = call_ranks(each_case, 2, partial(look, str(tmp_path)), cases)[0]
    expected = lora_reference(cases[0], rate_of_b=4e-3)
    for case in cases:
        assert_curves(found[case.name], expected, name=case.name)
