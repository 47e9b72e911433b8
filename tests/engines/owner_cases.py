"""What the tests of optimizers share whose updates need whole tensors."""

from typing import Any

import torch

from tests.engines.cases import megatron
from tests.engines.parity_worker import Case
from toolkit.optimizers.base import OptimizerKind


def small(**parallel: Any) -> Case:
    """As many layers as the reference."""
    return megatron(**{"family": {}, **parallel})


def deepspeed(stage: int, **more: Any) -> Case:
    return Case("deepspeed", 2, stage, **more)


def zeros(kind: OptimizerKind, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The states of a tensor's owner before the first step."""
    assert kind.whole is not None
    return {
        name: torch.zeros(state.shape(shape), dtype=getattr(torch, state.dtype))
        for name, state in kind.whole.states(shape).items()
    }
