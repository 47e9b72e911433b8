"""Rules about the data: its sources, their shares and stages, and what the objective needs."""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.objectives import OBJECTIVES
from toolkit.recipe.schema import ChatRowsSource, HfSource, Recipe, Source


def _validation(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if recipe.evaluation.every_steps and not data.validation and not data.validation_fraction:
        allowed = "null without validation data"
        fix = "add `validation_fraction: 0.01` under `data`, or remove it"
        found = f"{recipe.evaluation.every_steps}, but no validation data"
        yield Problem("evaluation.every_steps", found, allowed, fix)


def _objective(recipe: Recipe) -> Iterator[Problem]:
    """Refuse data for another objective. Packed text has no pairs. Conversations have tokens
    that are not to be trained."""
    data, objective = recipe.data, recipe.training.objective
    trained = {key: one.kind for key, one in data.named_sources if key.startswith("data.train")}
    for key, kind in trained.items():
        if (kind == "preference") != (data.kind == "preference"):
            found = f"{kind} with `kind: {data.kind}` in {next(iter(trained))}"
            allowed = "preferences alone, whose samples are pairs of rows, or none"
            fix = "train on them one after the other, with objectives of their own"
            yield Problem(f"{key}.kind", found, allowed, fix)
            return
    kinds, blended = OBJECTIVES[objective].data_kinds, OBJECTIVES[objective].blended_kinds
    wrong = {key: kind for key, kind in trained.items() if kind not in (*kinds, *blended)}
    if not set(kinds) & set(trained.values()):
        wrong = wrong or trained  # only what may stand next to the objective's own
    if kinds and wrong:
        key, kind = next(iter(wrong.items()))
        others = [name for name in OBJECTIVES.names if kind in OBJECTIVES[name].data_kinds]
        fix = f"set training.objective to {' or '.join(others)}, or use other data"
        found = f"{kind} with `objective: {objective}`"
        yield Problem(f"{key}.kind", found, ", ".join(kinds), fix)


def _forms(recipe: Recipe) -> Iterator[Problem]:
    """Refuse settings for another form of data, and validation data of another form."""
    data, kind = recipe.data, recipe.data.kind
    forms = {_form(source) for source in data.sources}
    documents, chats = "documents" in forms, forms != {"documents"}
    if data.chat_template is not None and not chats:
        fix = "remove it, or use `kind: chat`"
        yield Problem("data.chat_template", "a template", f"null with `kind: {kind}`", fix)
    fits = {"none": True, "greedy": "chat" in forms, "best_fit": documents}
    if not fits[data.packing]:
        found = f"{data.packing} with `kind: {kind}`"
        allowed = "none, greedy with chats, or best_fit with documents"
        fix = f"write {' or '.join(name for name in fits if fits[name])}"
        yield Problem("data.packing", found, allowed, fix)
    if data.isolate_documents and not documents:
        allowed, fix = f"false with `kind: {kind}`", "remove it: `packing: greedy` isolates"
        yield Problem("data.isolate_documents", "true", allowed, fix)
    if documents and fits["greedy"] and data.packing == "greedy" and not data.isolate_documents:
        allowed = "true: `packing: greedy` isolates conversations, and all rows have one form"
        fix = "set it to true, or remove `packing: greedy`"
        yield Problem("data.isolate_documents", "false with documents", allowed, fix)
    for key, source in data.named_sources:
        if key.startswith("data.validation") and _form(source) not in forms:
            found = f"{source.kind} with `kind: {kind}` in {data.named_sources[0][0]}"
            fix = f"give data of `kind: {kind}`, or use `validation_fraction`"
            yield Problem(f"{key}.kind", found, "a kind of data.train", fix)


def _form(source: Source) -> str:
    """The form of a row: a chat, a preference, or a part of documents."""
    return source.kind if isinstance(source, ChatRowsSource) else "documents"


def _sources(recipe: Recipe) -> Iterator[Problem]:
    """Refuse settings for lists of sources only, or for chats and preferences only."""
    for key, source in recipe.data.named_sources:
        for name in ("weight", "epochs"):
            value = getattr(source, name)
            if value is not None and not key.startswith("data.train["):
                allowed = "nothing: it belongs to a list of sources in data.train"
                fix = "remove it, or write data.train as a list (`- kind: …`)"
                yield Problem(f"{key}.{name}", str(value), allowed, fix)
        if isinstance(source, HfSource) and source.malformed == "drop":
            allowed = "error: rows are dropped of chats and preferences alone"
            yield Problem(f"{key}.malformed", "drop", allowed, "correct or remove such rows")


def _shares(recipe: Recipe) -> Iterator[Problem]:
    """Check that each source of a list has a title of its own, and that all have weights or
    epochs."""
    data = recipe.data
    if not isinstance(data.train, tuple):
        return
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


def _stages(recipe: Recipe) -> Iterator[Problem]:
    """Check that stages come in order, each with a weight for every source of a list."""
    data, before = recipe.data, 0
    titles = {source.title for source in data.sources}
    for number, stage in enumerate(data.stages):
        key = f"data.stages[{number}]"
        first = stage.from_step
        if first <= before:
            allowed = f"a step after {before}"
            yield Problem(key, f"a stage from step {first}", allowed, "put stages in order")
        before, key = first, f"{key}.weights"
        if not isinstance(data.train, tuple) or data.sources[0].epochs is not None:
            fix = "give `data.train` as a list of sources with `weight`, or remove the stage"
            found = "weights of one source, or of sources with epochs"
            yield Problem(key, found, "stages of a list of sources with weights", fix)
        elif stage.weights.keys() != titles:
            missing, unknown = titles - stage.weights.keys(), stage.weights.keys() - titles
            parts = (("nothing for", missing), ("unknown sources", unknown))
            found = " and ".join(f"{what} {', '.join(sorted(no))}" for what, no in parts if no)
            allowed = f"a weight for each of {', '.join(sorted(titles))}"
            fix = "name every source once (0: none of it); `label` names a source"
            yield Problem(key, found, allowed, fix)
        elif not any(stage.weights.values()):
            yield Problem(key, "only zeros", "a sum above 0", "raise a weight")


DATA_RULES = (_validation, _objective, _forms, _sources, _shares, _stages)
