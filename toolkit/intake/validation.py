"""Settings that depend on the validation loss: there is one when they need it."""

import math
from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.recipe.schema import Recipe


def following_problems(recipe: Recipe) -> Iterator[Problem]:
    """A schedule, an early end or a best checkpoint without validations would do nothing."""
    if recipe.evaluation.every_steps is None:
        for key, value in recipe.follows_validation.items():
            found = f"{value}, but no validation during training"
            fix = "set evaluation.every_steps to 100, or remove it"
            yield Problem(key, found, "nothing of it without evaluation.every_steps", fix)
        return
    if recipe.checkpoint.keep_best is not None:
        yield from _best(recipe, recipe.evaluation.every_steps)


def _best(recipe: Recipe, validated: int) -> Iterator[Problem]:
    """Checkpoints of steps that are validated, too."""
    keep, saved = recipe.checkpoint.keep_best, recipe.checkpoint.every_steps
    key, steps = "checkpoint.every_steps", recipe.total_steps()
    if saved is None:
        fix = f"set it to {validated}, or remove checkpoint.keep_best"
        yield Problem(key, f"null with `keep_best: {keep}`", "a number of steps", fix)
        return
    both = math.lcm(saved, validated)
    if steps is not None and both >= steps:
        found = f"{saved}, but validations every {validated} of {steps:,} steps"
        allowed = "with keep_best, a step before the last that is saved and validated"
        below = saved // validated * validated or validated
        fix = f"set {key} to {below}" if below < steps else "validate and save more often"
        yield Problem(key, found, allowed, fix)
