"""`model.balance` in every layout, compared with a plain loop of transformers and torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.engines.cases import MIXTRAL, TOLERANCE, megatron, run
from tests.engines.parity_worker import (
    GLOBAL_BATCH,
    LENGTH,
    Case,
    clipped,
    global_batches,
    reference_model,
)
from toolkit.batch import IGNORE_INDEX

STEPS = 6
SETTINGS = {"kind": "sequence_loss", "coefficient": 0.05, "z_loss": 0.02}
"""Large enough that a part of a term that is missing is seen in the norm."""


def balanced(case: Case, **settings: Any) -> Case:
    return replace(case, steps=STEPS, balance=SETTINGS | settings)


def hf(
    engine: str, micro_batch: int, stage: int | str = "auto", recompute: str = "none"
) -> Case:
    return balanced(Case(engine, micro_batch, stage, recompute=recompute, family=MIXTRAL))


ONE = [hf("ddp", 1), hf("ddp", 4), hf("ddp", 8, recompute="full")]
TWO = [
    hf("ddp", 2),
    hf("fsdp", 1),
    hf("fsdp", 4, recompute="full"),
    hf("deepspeed", 2, 3),
    hf("deepspeed", 1, 2, recompute="full"),
    balanced(megatron(expert=2, family=MIXTRAL)),
    balanced(megatron(pipeline=2, micro_batch=1, recompute="full", family=MIXTRAL)),
]
FOUR = [
    balanced(megatron(expert=2, tensor=2, family=MIXTRAL)),
    balanced(megatron(pipeline=2, tensor=2, recompute="full", family=MIXTRAL)),
]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    return reference()


def reference() -> dict[str, list[float]]:
    """Loss, gradient norm and what is logged, from whole global batches."""
    model, optimizer = reference_model(Case("ddp", GLOBAL_BATCH, family=MIXTRAL))
    found: dict[str, list[float]] = {}
    for inputs, labels in global_batches(STEPS):
        output = model(inputs, output_router_logits=True)
        loss = cross_entropy(
            output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
        )
        layers = [logits.view(GLOBAL_BATCH, LENGTH, -1) for logits in output.router_logits]
        terms = [terms_of(logits, labels) for logits in layers]
        balance, z = (sum(part) / GLOBAL_BATCH for part in zip(*terms, strict=True))
        optimizer.zero_grad()
        (loss + SETTINGS["coefficient"] * balance + SETTINGS["z_loss"] * z).backward()
        values = {
            "loss": loss.item(),
            "grad_norm": clipped(model),
            "balance_loss": SETTINGS["coefficient"] * balance.item(),
            "router_z_loss": SETTINGS["z_loss"] * z.item(),
            "busiest_expert": max(busiest(logits, labels) for logits in layers),
            "router_entropy": entropy(layers, labels),
            "dropped_tokens": 0.0,
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
        optimizer.step()
    return found


def lengths(labels: torch.Tensor) -> list[int]:
    """Tokens of each row up to the last that is trained."""
    return [
        max([at + 1 for at, one in enumerate(row) if one != IGNORE_INDEX], default=0)
        for row in labels.tolist()
    ]


def terms_of(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both terms of a layer [rows, tokens, experts], summed over its rows one by one."""
    balance, z = torch.zeros(()), torch.zeros(())
    for row, length in zip(logits, lengths(labels), strict=True):
        if length == 0:
            continue
        mine = row[:length]
        scores, experts = mine.softmax(-1), mine.shape[-1]
        chosen = scores.topk(2).indices.flatten().bincount(minlength=experts)
        frequency = experts / (2 * length) * chosen
        balance = balance + (frequency * scores.mean(0)).sum()
        z = z + mine.exp().sum(-1).log().pow(2).mean()
    return balance, z


def real(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The logits of all tokens that are no padding."""
    parts = zip(logits, lengths(labels), strict=True)
    return torch.cat([row[:length] for row, length in parts])


def busiest(logits: torch.Tensor, labels: torch.Tensor) -> float:
    counts = real(logits, labels).topk(2).indices.flatten().bincount(minlength=4)
    return (counts.max() / counts.double().mean()).item()


def entropy(layers: list[torch.Tensor], labels: torch.Tensor) -> float:
    logits = torch.cat([real(logits, labels) for logits in layers])
    return torch.distributions.Categorical(logits=logits).entropy().mean().item()


def check(result: dict[str, Any], expected: dict[str, list[float]]) -> None:
    logged = {name: [step[name] for step in result["metrics"]] for name in result["metrics"][0]}
    found = logged | {name: result[name] for name in ("loss", "grad_norm")}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE), name


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_layouts_equal_a_plain_loop(world: int, expected: dict[str, list[float]]) -> None:
    for name, result in run({1: ONE, 2: TWO, 4: FOUR}[world], world).items():
        print(name)
        check(result, expected)
