"""AdamW, whichever implementation an engine uses (torch's, DeepSpeed's, a fused one): which
parameters decay, moments and step counts."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import CheckpointError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups of what trains: weight decay for matrices, none for norms and biases.

    Norm weights and biases are exactly the parameters with one dimension. Under ZeRO-3
    a parameter's own shape is empty and `ds_shape` holds the real one.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in filter(lambda one: one.requires_grad, model.parameters()):
        shape = getattr(parameter, "ds_shape", parameter.shape)
        (decayed if len(shape) > 1 else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def moments(optimizer: Any, weight: Tensor) -> Mapping[str, Tensor]:
    """The fp32 weight and its two moments, by quantity; zeros before the first step."""
    state = optimizer.state[weight]
    if "exp_avg" not in state:
        if not _counts_in_groups(optimizer):
            # torch counts in a tensor, which its fused kernel wants on the weight's device;
            # DeepSpeed's implementations in a number.
            own = isinstance(optimizer, torch.optim.AdamW)
            fused = own and optimizer.defaults["fused"]
            device = weight.device if fused else torch.device("cpu")
            state["step"] = torch.zeros((), device=device) if own else 0
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    return {"weight": weight, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def states(optimizer: Any, parameter: nn.Parameter) -> Mapping[str, Tensor]:
    """The `moments` of a parameter that is its own master; of a frozen one the weight alone."""
    if not parameter.requires_grad:
        return {"weight": parameter}
    return moments(optimizer, parameter)


def _counts_in_groups(optimizer: Any) -> bool:
    """Transformer Engine's and apex' AdamW count steps once for a whole group."""
    kind = type(optimizer)
    return kind.__name__ == "FusedAdam" and not kind.__module__.startswith("deepspeed.")


def _counting(optimizer: Any) -> list[dict[str, Any]]:
    """Where an optimizer counts its steps."""
    if _counts_in_groups(optimizer):
        return list(optimizer.param_groups)
    return list(optimizer.state.values())


def steps_of(optimizers: Iterable[Any]) -> int:
    """Updates made. Raises CheckpointError when not all parameters have had equally many."""
    counts = {
        int(holder.get("step", 0))
        for optimizer in optimizers
        for holder in _counting(optimizer)
    }
    if len(counts) > 1:
        raise CheckpointError(
            f"AdamW has updated some parameters {min(counts)} and others {max(counts)} times; "
            "a checkpoint has one number for all"
        )
    return counts.pop() if counts else 0


def set_steps(optimizers: Iterable[Any], steps: int) -> None:
    """Let the bias correction continue at `steps`; no two parameters share a tensor for it."""
    for optimizer in optimizers:
        for holder in _counting(optimizer):
            old = holder.get("step")
            holder["step"] = torch.full_like(old, steps) if isinstance(old, Tensor) else steps
