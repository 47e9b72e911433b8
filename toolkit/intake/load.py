"""A recipe file → a frozen, checked `Recipe`, or every mistake at once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from toolkit.errors import Problem, RecipeError
from toolkit.intake.checks import broken_rules
from toolkit.intake.layers import read_layers
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.recipe.explain import MAX_PROBLEMS, UNKNOWN_KEY, explain
from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_text import WHOLE_FILE, Stated, dotted, parts_of
from toolkit.text.redact import MASK, redact, redactor
from toolkit.text.units import shortened

_LONGEST_TEXT = 200
"""Longest `found` or `fix` shown, in characters."""


def load_recipe(
    path: str | Path, overrides: str | Sequence[str] = (), cluster: str | Cluster | None = None
) -> Recipe:
    """Read, merge and check the recipe at `path`, or the shipped one of that name.

    `overrides` are `KEY.PATH=VALUE` texts, or one, put on top in order; `cluster` replaces the
    recipe's own, in the words of `--cluster`. Paths in the recipe are absolute afterwards:
    those in a file are relative to it, those in an override to the working directory.

    Raises RecipeError with every mistake in single settings or, where there is none, every
    broken rule. They are in file order: the recipe's own lines, then those of the files it
    extends, then overrides. Secrets are masked in it.
    """
    section = {} if cluster is None else find_cluster(cluster).section
    there = [f"cluster.{key}={value}" for key, value in section.items()]
    stated = [overrides] if isinstance(overrides, str) else overrides
    try:
        layers = read_layers(Path(path), [*stated, *there])
    except RecipeError as error:
        raise RecipeError(_presentable(error.problems, ())) from None
    problems = [one for layer in layers.each for one in _secrets(layer)]
    problems += layers.problems
    try:
        recipe = Recipe.model_validate(layers.merged.data)
        if not problems:
            problems += (_placed(one, layers.merged) for one in broken_rules(recipe))
    except ValidationError as error:
        problems += explain(error, layers.merged)
    except RecipeError as error:
        problems += error.problems
    if problems:
        raise RecipeError(_presentable(problems, layers.files))
    return recipe


def _secrets(stated: Stated) -> Iterator[Problem]:
    """Credentials anywhere in a file; the values themselves are never shown."""
    looks_secret = redactor().looks_secret
    for path in stated.written:
        value = stated.at(path)
        if isinstance(value, str):  # as written: a path has been made absolute
            value = stated.unquoted(path)
        if looks_secret(dotted(path), value):
            fix = "remove it and set the environment variable (HF_TOKEN, WANDB_API_KEY) instead"
            place = stated.place(path)
            yield Problem(dotted(path), MASK, "no credentials in a recipe", fix, *place)


def placed(problem: Problem, path: Path, overrides: Sequence[str]) -> Problem:
    """A problem that was found after loading, with its place in the recipe at `path` unless
    it is in another file; secrets masked."""
    redacted = replace(problem, found=redact(problem.found))
    if problem.file:
        return redacted
    return _placed(redacted, read_layers(path, overrides).merged)


def _placed(problem: Problem, stated: Stated) -> Problem:
    file, line = stated.place(parts_of(problem.key))
    return replace(problem, file=file, line=line)


def _presentable(problems: Iterable[Problem], files: Sequence[str]) -> list[Problem]:
    """One problem per setting, in file order, short, with secrets masked."""
    first: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.key, problem.file), problem)
    rank = {file: index for index, file in enumerate(files)}
    ordered = sorted(first.values(), key=lambda p: (rank.get(p.file, 0), p.line))
    if more := ordered[MAX_PROBLEMS:]:
        unknown = sum(problem.found == UNKNOWN_KEY for problem in more)
        found = f"{len(more):,} more problems, {unknown:,} of them unknown keys"
        place = more[0].file, more[0].line
        last = Problem(WHOLE_FILE, found, "none", "is this a recipe?", *place)
        ordered = [*ordered[:MAX_PROBLEMS], last]

    mask = redactor().redact

    def short(text: str) -> str:
        return shortened(mask(text), _LONGEST_TEXT)

    return [
        Problem(
            short(one.key),
            short(one.found),
            mask(one.allowed),
            short(one.fix),
            one.file,
            one.line,
        )
        for one in ordered
    ]
