"""A batch that grows: its sizes lead to the whole batch, and every layout can spread them."""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.plan.rules import legality
from toolkit.recipe.schema import BatchRampSection, Recipe

_KEY = "training.batch_ramp"


def ramp_problems(recipe: Recipe) -> Iterator[Problem]:
    """Sizes between the first and the whole batch, in a run without stages."""
    ramp, whole = recipe.training.batch_ramp, recipe.training.global_batch_size
    if ramp is None:
        return
    if (ramp.steps is None) == (ramp.tokens is None):
        fix = "write `steps: N` or `tokens: N`"
        yield Problem(_KEY, "both or neither", "one of steps and tokens", fix)
        return
    if ramp.start >= whole:
        fix = "set it to less, or remove training.batch_ramp"
        allowed = f"less than training.global_batch_size ({whole})"
        yield Problem(f"{_KEY}.start", str(ramp.start), allowed, fix)
        return
    if recipe.data.stages:
        return  # `EITHER` in checks.py
    yield from _sizes(recipe, ramp)


def _sizes(recipe: Recipe, ramp: BatchRampSection) -> Iterator[Problem]:
    """Every size must be a multiple of what all ranks compute at once."""
    ranks = legality.data_parallel(recipe.parallel, recipe.cluster) or 1
    micro = recipe.training.micro_batch_size
    unit = ranks if micro == "auto" else ranks * micro
    for name, size in (("start", ramp.start), ("increment", ramp.increment)):
        if size % unit:
            allowed = f"a multiple of {unit} (micro batch · data-parallel ranks)"
            fix = f"set {_KEY}.{name} to {max(unit, size // unit * unit)}"
            yield Problem(f"{_KEY}.{name}", str(size), allowed, fix)
