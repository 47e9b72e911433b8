"""Stages of the data: when each begins, and what it may change."""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.plan.rules import legality
from toolkit.recipe.schema import ChatRowsSource, Recipe, StageSection

_MOST_PARTS = 2**14
"""Samples of a block times sources: the numbers of streamed samples must stay below 2⁶³."""


def stage_problems(recipe: Recipe) -> Iterator[Problem]:
    """Stages begin one after the other; each changes weights or length."""
    data, before = recipe.data, 0
    for number, stage in enumerate(data.stages):
        key = f"data.stages[{number}]"
        if (stage.from_step is None) == (stage.from_tokens is None):
            fix = "write `from_step: N` or `from_tokens: N`"
            yield Problem(key, "both or neither", "one of from_step and from_tokens", fix)
            return
        first = recipe.lengths.stages[number + 1].first_step
        if first <= before:
            allowed = f"a step after {before}"
            yield Problem(key, f"a stage from step {first}", allowed, "put stages in order")
        before = first
        if stage.weights is None and stage.sequence_length is None:
            fix = "add `weights: {…}` or `sequence_length: N`, or remove the stage"
            yield Problem(key, "neither", "at least one of weights and sequence_length", fix)
        if stage.weights is not None:
            yield from _weights(recipe, key, stage.weights)
        if stage.sequence_length is not None:
            yield from _data_with_lengths(recipe, f"{key}.sequence_length", stage)
    yield from _lengths(recipe)


def _weights(recipe: Recipe, key: str, weights: dict[str, float]) -> Iterator[Problem]:
    """A weight for every source of a list of sources with weights."""
    data, key = recipe.data, f"{key}.weights"
    if not isinstance(data.train, tuple):
        fix = "remove it, or give `data.train` as a list of sources with weights"
        yield Problem(key, "weights", "null with one source", fix)
        return
    if data.sources[0].epochs is not None:
        fix = "write `weight` instead of `epochs` in data.train, or remove the weights"
        yield Problem(key, "weights of sources with epochs", "sources with weights", fix)
        return
    titles = {source.title for source in data.sources}
    if weights.keys() != titles:
        missing, unknown = titles - weights.keys(), weights.keys() - titles
        found = " and ".join(
            f"{what} {', '.join(sorted(names))}"
            for what, names in (("nothing for", missing), ("unknown sources", unknown))
            if names
        )
        allowed = f"a weight for each of {', '.join(sorted(titles))}"
        fix = "name every source once (0: none of it); `label` names a source"
        yield Problem(key, found, allowed, fix)
    elif not any(weights.values()):
        yield Problem(key, "only zeros", "a sum above 0", "raise a weight")


def _data_with_lengths(recipe: Recipe, key: str, stage: StageSection) -> Iterator[Problem]:
    """Only documents that are laid end to end can be cut anywhere."""
    data = recipe.data
    fix = "remove sequence_length from data.stages"
    chats = [one.kind for one in data.sources if isinstance(one, ChatRowsSource)]
    if chats:
        allowed = f"null with `kind: {chats[0]}`: a conversation is one row"
        yield Problem(key, str(stage.sequence_length), allowed, fix)
    elif data.packing == "best_fit":
        allowed = "null with `packing: best_fit`, which fills rows of one length"
        fix += ", or set data.packing to none"
        yield Problem(key, str(stage.sequence_length), allowed, fix)


def stated_lengths(recipe: Recipe) -> dict[str, int]:
    """Every length of sequences that the recipe states, by its dotted key."""
    return {"training.sequence_length": recipe.training.sequence_length} | {
        f"data.stages[{number}].sequence_length": stage.sequence_length
        for number, stage in enumerate(recipe.data.stages)
        if stage.sequence_length is not None
    }


def _lengths(recipe: Recipe) -> Iterator[Problem]:
    """Every length is a part of the longest."""
    lengths, data = recipe.lengths, recipe.data
    longest = lengths.longest
    for key, length in stated_lengths(recipe).items():
        if longest % length:
            parts_of_it = (n for n in range(2, longest + 1) if longest % n == 0)
            near = legality.nearest(length, parts_of_it)
            allowed = f"a divisor of {longest}, the longest of the run"
            yield Problem(key, str(length), allowed, f"set it to {near}")
    parts = longest // lengths.all[0]
    if parts * len(data.sources) > _MOST_PARTS:
        found = f"{longest}, {parts} times the shortest, of {len(data.sources)} sources"
        allowed = f"lengths and sources whose product is at most {_MOST_PARTS}"
        yield Problem("data.stages", found, allowed, "raise the shortest length")
