"""Makes DeepSpeed skip a step that it would otherwise apply.

Every optimizer of DeepSpeed skips, on all ranks, a step whose gradient norm is not finite, and
cleans up afterwards, because fp16 needs that. So a veto sets one gradient of the last micro
batch to NaN. It is decided on the device, by the loss of the global batch, late in the backward
pass: until then, the losses are summed over the ranks asynchronously.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.engines.deepspeed.state import scaler_state
from toolkit.errors import RunFailed


class Veto:
    """The veto of one engine. Built before DeepSpeed takes the module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._loss: Callable[[], Tensor] | None = None
        """The loss to check, and the values after it. None outside the last micro batch."""
        self._max_loss = math.inf
        self._scaler: dict[str, Any] = {}
        """fp16's loss scale and counts before this step."""
        _always_used(module).register_hook(self._spoil)  # type: ignore[no-untyped-call]

    def _spoil(self, gradient: Tensor) -> Tensor | None:
        if self._loss is None:
            return None
        loss = self._loss()[0]
        accepted = torch.isfinite(loss) & (loss <= self._max_loss)
        return gradient * torch.where(accepted, 1.0, torch.nan)

    def judge(self, joint: Callable[[], Tensor], max_loss: float, optimizer: Any) -> None:
        """Decide after the last forward pass whether the step is vetoed. `joint` returns the
        global loss and metrics, the loss first. It is called late in the backward pass."""
        self._loss = joint
        self._max_loss = max_loss
        self._scaler = dict(scaler_state(optimizer))

    def end_step(self, refused: bool, applied: bool, optimizer: Any) -> None:
        """Check after the step that it was not `applied` if it was `refused`.

        A step refused because of its loss must not change fp16's loss scale, which is restored.
        Raises RunFailed if DeepSpeed applied the step nevertheless.
        """
        self._loss = None
        if refused and applied:
            raise RunFailed(
                "this version of DeepSpeed does steps whose gradients are not finite",
                fix="pip install 'deepspeed>=0.19.8', the version that was tested",
            )
        if refused:
            scaler_state(optimizer).update(self._scaler)


def let_skip(optimizer: torch.optim.Optimizer) -> None:
    """Add to a plain optimizer (fp32, stage 0) what DeepSpeed's own have: if its attribute
    `overflow` is true, a step does nothing."""
    step = optimizer.step
    optimizer.overflow = False  # type: ignore[attr-defined]

    def step_unless_overflow() -> None:
        if not optimizer.overflow:  # type: ignore[attr-defined]
            step()

    optimizer.step = step_unless_overflow  # type: ignore[assignment, method-assign]


def _always_used(module: nn.Module) -> nn.Parameter:
    """A small parameter that every loss depends on: the first norm or bias."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # With ZeRO-3 a parameter's own shape is empty.
    small = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) == 1]
    return (small or parameters)[0]
