"""Rules over sources of data: settings that need others, weights and titles of lists of
them."""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.recipe.schema import HfSource, Recipe, Source


def blend_problems(recipe: Recipe) -> Iterator[Problem]:
    """Shares of a list of sources, and what means something for a list only."""
    data = recipe.data
    for key, source in data.named_sources:
        if not key.startswith("data.train["):
            yield from _no_shares(key, source)
        yield from _no_drop(key, source)
    if not isinstance(data.train, tuple):
        return
    yield from _shares(recipe)


def _no_shares(key: str, source: Source) -> Iterator[Problem]:
    for name, default in (("weight", None), ("epochs", None), ("at_end", "repeat")):
        if (found := getattr(source, name)) != default:
            allowed = "nothing: it belongs to a list of sources in data.train"
            fix = "remove it, or write data.train as a list (`- kind: …`)"
            yield Problem(f"{key}.{name}", str(found), allowed, fix)


def _no_drop(key: str, source: Source) -> Iterator[Problem]:
    if isinstance(source, HfSource) and source.malformed == "drop":
        allowed = "error: rows are dropped of chats and preferences alone"
        yield Problem(f"{key}.malformed", "drop", allowed, "correct or remove such rows")


def _shares(recipe: Recipe) -> Iterator[Problem]:
    """Every source of a list has a unique title, and a weight or epochs like all others."""
    data = recipe.data
    by_epochs = data.sources[0].epochs is not None
    kind, other = ("epochs", "weight") if by_epochs else ("weight", "epochs")
    seen: dict[str, str] = {}
    for key, source in data.named_sources:
        side = key.partition("[")[0]
        first = seen.setdefault(f"{side} {source.title}", key)
        if first != key:
            fix = "give each a `label`"
            yield Problem(f"{key}.label", f"{source.title}, as {first}", "different ones", fix)
        if side != "data.train":
            continue
        if getattr(source, other) is not None:
            found = f"{other} with {kind} in data.train[0]"
            yield Problem(f"{key}.{other}", found, "one of the two, in all", f"write {kind}")
        elif getattr(source, kind) is None:
            allowed = "weight or epochs, the same in all sources"
            yield Problem(f"{key}.{kind}", "nothing", allowed, f"add e.g. `{kind}: 1`")
    if not by_epochs and not any(source.weight for source in data.sources):
        yield Problem("data.train", "no weight above 0", "a sum above 0", "raise a weight")
    if recipe.training.epochs is not None and not by_epochs:
        fix = "write training.steps or training.tokens, or `epochs` instead of `weight`"
        found = f"{recipe.training.epochs:g} of sources with weights"
        yield Problem("training.epochs", found, "null: they do not end together", fix)
