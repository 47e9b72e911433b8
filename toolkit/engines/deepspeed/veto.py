"""Makes DeepSpeed skip a step that it would do.

Every optimizer of DeepSpeed refuses, on all ranks alike, a step whose gradient norm is not
finite, and cleans up after itself: fp16 could not train without that. So a veto makes one
gradient of the last micro batch NaN. It is decided on the device. Without a limit for finite
losses, each rank judges its own loss: a NaN in its gradient becomes one in everybody's norm.
With one, the global loss decides, late in the backward pass: until then the losses are summed
over the ranks without anybody waiting for it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import RunFailed


class Veto:
    """The veto of one engine. Built before DeepSpeed takes the module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._loss: Callable[[], Tensor] | None = None
        """The loss to judge, and what follows it; None outside the last micro batch."""
        self._max_loss = math.inf
        self._scaler: dict[str, Any] = {}
        """fp16's loss scale and counts as they were before this step."""
        _always_used(module).register_hook(self._spoil)  # type: ignore[no-untyped-call]

    def _spoil(self, gradient: Tensor) -> Tensor | None:
        if self._loss is None:
            return None
        loss = self._loss()[0]
        accepted = torch.isfinite(loss) & (loss <= self._max_loss)
        return gradient * torch.where(accepted, 1.0, torch.nan)

    def judge(
        self, mine: Tensor, joint: Callable[[], Tensor], max_loss: float, optimizer: Any
    ) -> None:
        """Call after the last forward: may its backward be trusted? `mine` is this rank's part
        of loss and metrics, the loss first; `joint` returns the global ones, and is called late
        in the backward."""
        self._loss = joint if max_loss < math.inf else lambda: mine
        self._max_loss = max_loss
        self._scaler = dict(_scaler_state(optimizer))

    def end_step(self, refused: bool, applied: bool, optimizer: Any) -> None:
        """Call after the step, which must not have been `applied` when it was `refused`.

        What was refused for its loss says nothing about fp16's loss scale, which is put
        back. Raises RunFailed when DeepSpeed did the step nevertheless.
        """
        self._loss = None
        if refused and applied:
            raise RunFailed(
                "this version of DeepSpeed does steps whose gradients are not finite",
                fix="pip install 'deepspeed>=0.19.8', the version that was tested",
            )
        if refused:
            _scaler_state(optimizer).update(self._scaler)


def let_skip(optimizer: torch.optim.Optimizer) -> None:
    """Give a plain optimizer (fp32, stage 0) what DeepSpeed's own have: where its attribute
    `overflow` is true, a step does nothing."""
    step = optimizer.step
    optimizer.overflow = False  # type: ignore[attr-defined]

    def step_unless_overflow() -> None:
        if not optimizer.overflow:  # type: ignore[attr-defined]
            step()

    optimizer.step = step_unless_overflow  # type: ignore[assignment, method-assign]


def _always_used(module: nn.Module) -> nn.Parameter:
    """A small parameter through which every loss goes: the first norm or bias."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # Under ZeRO-3 a parameter's own shape is empty.
    small = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) == 1]
    return (small or parameters)[0]


def _scaler_state(optimizer: Any) -> dict[str, Any]:
    """The attributes of the loss scaler, under either of its names; empty without one."""
    for name in ("loss_scaler", "loss_scale_config"):
        if hasattr(optimizer, name):
            state: dict[str, Any] = vars(getattr(optimizer, name))
            return state
    return {}
