"""A recipe file → a frozen, checked `Recipe`, or every mistake at once."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from toolkit.errors import Problem, RecipeError
from toolkit.intake.checks import broken_rules
from toolkit.intake.layers import read_layers
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.recipe.mistakes import explain
from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_text import Stated, parts_of
from toolkit.text.redact import redact
from toolkit.text.units import shortened

_LONGEST_TEXT = 200
"""Longest `found` or `fix` shown, in characters."""


def load_recipe(
    path: str | Path, overrides: str | Sequence[str] = (), cluster: str | Cluster | None = None
) -> Recipe:
    """Read, merge and check the recipe at `path`, or the shipped one of that name.

    `overrides` are `KEY.PATH=VALUE` texts, or one, put on top in order. `cluster` replaces the
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
    if not layers.problems:
        return judged(layers.merged, layers.files)
    problems = [*layers.problems]
    try:
        valid(layers.merged, ())
    except RecipeError as error:
        problems += error.problems
    raise RecipeError(_presentable(problems, layers.files))


def valid(stated: Stated, files: Sequence[str] = ()) -> Recipe:
    """The recipe, each setting of which is valid by itself. Raises RecipeError with every
    mistake."""
    try:
        return Recipe.model_validate(stated.data)
    except ValidationError as error:
        raise RecipeError(_presentable(explain(error, stated), files)) from error


def judged(stated: Stated, files: Sequence[str] = ()) -> Recipe:
    """The recipe, which breaks no rule. Raises RecipeError as `load_recipe` does."""
    recipe = valid(stated, files)
    if broken := [_placed(one, stated) for one in broken_rules(recipe)]:
        raise RecipeError(_presentable(broken, files), [*recipe.notes])
    return recipe


def placed(problem: Problem, path: Path, overrides: Sequence[str]) -> Problem:
    """A problem found after loading, with its place in the recipe at `path`. A problem that
    names another file keeps its place. Secrets are masked."""
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

    def short(text: str) -> str:
        return shortened(redact(text), _LONGEST_TEXT)

    return [
        replace(
            one,
            key=short(one.key),
            found=short(one.found),
            allowed=redact(one.allowed),
            fix=short(one.fix),
        )
        for one in ordered
    ]
