"""AdamW, whichever implementation an engine uses (torch's, DeepSpeed's, a fused one): which
parameters decay, moments and step counts. The optimizer of `owners.py` is included."""

from collections.abc import Collection, Iterable, Mapping, Set
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.checkpoint.shards import QUANTITIES
from toolkit.errors import CheckpointError
from toolkit.models.parameter_groups import Multipliers, multipliers
from toolkit.recipe.schema import OptimizerSection


def parameter_groups(
    parameters: Iterable[tuple[nn.Parameter, Collection[str]]],
    settings: OptimizerSection,
    owned: Set[nn.Parameter] = frozenset(),
) -> list[dict[str, Any]]:
    """Optimizer groups of the trained parameters: weight decay for matrices, none for norms and
    biases, and the multipliers of `settings.groups`. Those that an `UpdateRule` updates, the
    `owned` ones, have groups of their own.

    Each of `parameters` comes with the checkpoint tensors that it consists of. Norm weights and
    biases are exactly the parameters with one dimension, and the stacked biases of experts.
    Under ZeRO-3 a parameter's own shape is empty and `ds_shape` holds the real one.
    """
    found: dict[tuple[Multipliers, bool], list[nn.Parameter]] = {}
    for parameter, tensors in parameters:
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            own = multipliers(settings.groups, tensors)
            decays = len(shape) > 1 and not any(name.endswith("bias") for name in tensors)
            own = own if decays else own._replace(wd=0.0)
            found.setdefault((own, parameter in owned), []).append(parameter)
    return [
        {
            "params": members,
            "weight_decay": settings.weight_decay * own.wd,
            "lr_mult": own.lr,
            "wd_mult": own.wd,
            "owned": by_rule,
        }
        for (own, by_rule), members in sorted(found.items(), key=itemgetter(0), reverse=True)
    ]


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of every group of `parameter_groups` to its multiple of `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_mult"]


def moments(
    optimizer: Any, weight: Tensor, *, kept: Iterable[str] = QUANTITIES[1:]
) -> Mapping[str, Tensor]:
    """The fp32 weight and its `kept` moments, by quantity. Zeros before the first step."""
    state = optimizer.state[weight]
    if not state:
        if not _counts_in_groups(optimizer):
            # torch counts in a tensor, which its fused kernel requires on the weight's device;
            # DeepSpeed's implementations in a Python number.
            own = isinstance(optimizer, torch.optim.AdamW)
            fused = own and optimizer.param_groups[0]["fused"]
            device = weight.device if fused else torch.device("cpu")
            state["step"] = torch.zeros((), device=device) if own else 0
        for quantity in kept:
            state[quantity] = torch.zeros_like(weight)
    return {"weight": weight, **{q: state[q] for q in QUANTITIES[1:] if q in state}}


def states(optimizer: Any, parameter: nn.Parameter) -> Mapping[str, Tensor]:
    """The `moments` of a parameter that is its own master. For a frozen one only the weight."""
    if not parameter.requires_grad:
        return {"weight": parameter}
    return moments(optimizer, parameter)


def _counts_in_groups(optimizer: Any) -> bool:
    """Transformer Engine's and apex' AdamW count steps once for a whole group."""
    kind = type(optimizer)
    return kind.__name__ == "FusedAdam" and not kind.__module__.startswith("deepspeed.")


def _counting(optimizer: Any) -> list[dict[str, Any]]:
    """Where an optimizer counts its steps."""
    if _counts_in_groups(optimizer):  # not in groups of which this rank has no parameter
        return [group for group in optimizer.param_groups if group["params"]]
    return list(optimizer.state.values())


def steps_of(optimizers: Iterable[Any]) -> int:
    """Number of updates. Raises CheckpointError if it is not the same for all parameters."""
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
    """Set the step count of the bias correction to `steps`. No two parameters share a
    tensor."""
    for optimizer in optimizers:
        for holder in _counting(optimizer):
            old = holder.get("step")
            holder["step"] = torch.full_like(old, steps) if isinstance(old, Tensor) else steps
