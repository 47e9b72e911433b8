"""Rules about data that is tokenised while the run trains on it."""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.recipe.schema import HfSource, Recipe, TextSource

_WITHOUT = "null with data.streaming: the number of samples is not known before the end"


def streaming_problems(recipe: Recipe) -> Iterator[Problem]:
    """Settings that need to know all samples of a source, and sources that have no text."""
    data = recipe.data
    if data.streaming is None:
        return
    named = [one for one in data.named_sources if one[0].startswith("data.train")]
    streamed = [one for one in named if isinstance(one[1], TextSource | HfSource)]
    if not streamed:
        found, fix = f"settings with `kind: {data.kind}`", "remove it"
        yield Problem("data.streaming", found, "null without sources of text or hf", fix)
        return
    if recipe.training.epochs is not None:
        fix = "write training.steps or training.tokens"
        yield Problem("training.epochs", f"{recipe.training.epochs:g}", _WITHOUT, fix)
    if data.validation_fraction:
        fix = "set it to 0 and name validation documents in data.validation"
        yield Problem("data.validation_fraction", f"{data.validation_fraction}", _WITHOUT, fix)
    for key, source in streamed:
        if source.epochs is not None:
            yield Problem(f"{key}.epochs", f"{source.epochs:g}", _WITHOUT, "write `weight`")
        if source.at_end == "stop":
            fix = "remove it: the source is repeated in another order"
            yield Problem(f"{key}.at_end", "stop", f"repeat, {_WITHOUT[5:]}", fix)
        if isinstance(source, HfSource) and source.malformed_limit is not None:
            fix = "remove it: `malformed: drop` logs the dropped rows of each chunk"
            found = f"{source.malformed_limit}"
            yield Problem(f"{key}.malformed_limit", found, _WITHOUT, fix)
