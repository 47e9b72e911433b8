"""Rules of `parallel.outer`."""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.objectives.preference import REFERENCE
from toolkit.recipe.schema import Recipe

_KEY = "parallel.outer"


def outer_problems(recipe: Recipe) -> Iterator[Problem]:
    """Settings that `parallel.outer` does not allow. Their meaning depends on all samples, or
    on one run's validation losses."""
    if (outer := recipe.parallel.outer) is None:
        return
    steps, key = recipe.checkpoint.every_steps, "checkpoint.every_steps"
    if steps is not None and steps % outer.every_steps:
        nearest = -(-steps // outer.every_steps) * outer.every_steps
        allowed = f"null or a multiple of {outer.every_steps}, {_KEY}.every_steps"
        yield Problem(key, str(steps), allowed, f"set {key} to {nearest}")
    zero, data, training = recipe.parallel.zero, recipe.data, recipe.training
    stated = {
        "training.epochs": training.epochs and "steps or tokens",
        "training.batch_ramp": training.batch_ramp and "null",
        "data.stages": data.stages and "none",
        "schedule.name": recipe.schedule.name == "plateau" and "another schedule",
        "evaluation.patience": recipe.evaluation.patience and "null",
        "training.objective": REFERENCE in recipe.objective().reads
        and "an objective without a reference model",
        "parallel.zero.offload_optimizer": zero.offload_optimizer == "nvme" and "none or cpu",
        "parallel.zero.offload_parameters": zero.offload_parameters == "nvme" and "none or cpu",
        "parallel.balance": recipe.parallel.balance != "none" and "none",
    }
    for setting, instead in stated.items():
        if instead:
            found, fix = f"set, with {_KEY}", f"remove it, or {_KEY}"
            yield Problem(setting, found, f"{instead} with {_KEY}", fix)
