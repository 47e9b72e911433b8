"""What the tests of optimizers share whose updates need whole tensors: layouts, a reference
with experts as matrices of their own, the comparison."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.engines.cases import MIXTRAL, TOLERANCE, megatron, run
from tests.engines.parity_worker import Case, reference_model
from toolkit.optimizers.base import OptimizerKind

GPT2 = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128,
    "n_positions": 32, "vocab_size": 101, "tie_word_embeddings": True,
}  # fmt: skip
"""Stored [in, out], and turned in megatron-core."""
BOTTOM = ("model.embed_tokens.*", "model.layers.0.*")
"""All of the first of two pipeline stages."""


def small(**parallel: Any) -> Case:
    """As many layers as the reference."""
    return megatron(**{"family": {}, **parallel})


def deepspeed(stage: int, **more: Any) -> Case:
    return Case("deepspeed", 2, stage, **more)


def in_four(optimized: Callable[[Case], Case]) -> list[Case]:
    """Layouts of four processes."""
    return [
        optimized(small(tensor=2, pipeline=2, stage=1)),
        optimized(small(tensor=2, expert=2, stage=1, family=MIXTRAL)),
        *(
            optimized(replace(deepspeed(stage), parallel={"model": "megatron", "tensor": 2}))
            for stage in (1, 3)
        ),
    ]


def in_16_bits(optimized: Callable[[Case], Case]) -> list[Case]:
    """Layouts of two processes."""
    return [
        replace(optimized(case), precision=precision, steps=5)
        for case, precision in (
            (Case("ddp", 2), "fp16"),
            (Case("fsdp", 2, 3), "bf16"),
            *((deepspeed(stage), "bf16") for stage in (0, 1, 2, 3)),
            (small(tensor=2), "bf16"),
            (small(stage=1), "bf16"),
        )
    ]


def zeros(kind: OptimizerKind, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The states of a tensor's owner before the first step."""
    assert kind.whole is not None
    return {
        name: torch.zeros(state.shape(shape), dtype=getattr(torch, state.dtype))
        for name, state in kind.whole.states(shape).items()
    }


def plain_model(family: Any, freeze: tuple[str, ...]) -> nn.Module:
    """transformers' model with the first weights, of which `BOTTOM` is frozen or nothing."""

    def frozen(name: str) -> bool:
        return bool(freeze) and ("embed" in name or ".layers.0." in name)

    model, _ = reference_model(Case("ddp", 8, family=dict(family)), frozen)
    return model


class Parts:
    """Optimizers of a model's parameters, or of parts of them."""

    def __init__(self) -> None:
        self.parts: list[tuple[nn.Parameter, nn.Parameter, Any]] = []
        self.optimizers: list[Any] = []

    def experts(self, name: str, stack: nn.Parameter) -> list[nn.Parameter]:
        middle = stack.shape[1] // 2
        gate_up = slice(0, middle), slice(middle, None)
        for expert in range(len(stack)):
            for rows in gate_up if "gate_up" in name else (slice(None),):
                part = nn.Parameter(stack.data[expert, rows])
                self.parts.append((part, stack, (expert, rows)))
        return [part for part, of, _ in self.parts if of is stack]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _, stack, _ in self.parts:
            stack.grad = None

    def step(self) -> None:
        for part, stack, place in self.parts:
            assert stack.grad is not None
            part.grad = stack.grad[place]
        for optimizer in self.optimizers:
            optimizer.step()


def check(
    cases: Sequence[Case],
    world: int,
    expect: Callable[[Case], Any],
    tolerance: float = TOLERANCE,
) -> None:
    for case, (name, result) in zip(cases, run([*cases], world).items(), strict=True):
        expected = expect(case)
        for quantity in ("loss", "grad_norm"):
            wanted = expected[quantity][: case.steps]
            pairs = zip(result[quantity], wanted, strict=True)
            print(f"{name}: {quantity} {max(abs(a / b - 1) for a, b in pairs):.1e}")
            # A wrong update shows in the norms first: the losses agree to 5e-7.
            close = tolerance / 3 if quantity == "loss" else tolerance
            assert result[quantity] == pytest.approx(wanted, rel=close), name
