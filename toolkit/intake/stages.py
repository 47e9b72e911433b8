"""Stages of the data: when each begins, and the weights that it changes."""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.recipe.schema import Recipe


def stage_problems(recipe: Recipe) -> Iterator[Problem]:
    """Stages begin one after the other; each has a weight for every source."""
    data, before = recipe.data, 0
    for number, stage in enumerate(data.stages):
        key = f"data.stages[{number}]"
        if (stage.from_step is None) == (stage.from_tokens is None):
            fix = "write `from_step: N` or `from_tokens: N`"
            yield Problem(key, "both or neither", "one of from_step and from_tokens", fix)
            return
        first = stage.first_step(recipe.training.batches)
        if first <= before:
            allowed = f"a step after {before}"
            yield Problem(key, f"a stage from step {first}", allowed, "put stages in order")
        before = first
        yield from _weights(recipe, key, stage.weights)


def _weights(recipe: Recipe, key: str, weights: dict[str, float]) -> Iterator[Problem]:
    """A weight for every source of a list of sources with weights."""
    data, key = recipe.data, f"{key}.weights"
    if not isinstance(data.train, tuple):
        fix = "remove the stage, or give `data.train` as a list of sources with weights"
        yield Problem(key, "weights of one source", "stages of a list of sources", fix)
        return
    if data.sources[0].epochs is not None:
        fix = "write `weight` instead of `epochs` in data.train, or remove the stage"
        yield Problem(key, "weights of sources with epochs", "sources with weights", fix)
        return
    titles = {source.title for source in data.sources}
    if weights.keys() != titles:
        missing, unknown = sorted(titles - weights.keys()), sorted(weights.keys() - titles)
        parts = (("nothing for", missing), ("unknown sources", unknown))
        found = " and ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
        allowed = f"a weight for each of {', '.join(sorted(titles))}"
        fix = "name every source once (0: none of it); `label` names a source"
        yield Problem(key, found, allowed, fix)
    elif not any(weights.values()):
        yield Problem(key, "only zeros", "a sum above 0", "raise a weight")
