"""A recipe file → a frozen, checked `Recipe`, or every mistake at once.

read_layers   files, `extends`, `--set`, relative paths   (layers.py, yaml_nodes.py)
explain       types, ranges, unknown and missing keys     (schema.py, explain.py)
broken_rules  settings that disagree                      (checks.py)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from toolkit.errors import Problem, RecipeError
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.checks import broken_rules
from toolkit.intake.explain import (
    MAX_PROBLEMS,
    UNKNOWN_KEY,
    Explained,
    explain,
    is_inside,
    parts_of,
    place_of,
)
from toolkit.intake.layers import layer_of, merge, read_layers
from toolkit.intake.repair import repaired
from toolkit.recipe import yaml_nodes
from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_nodes import WHOLE_FILE
from toolkit.text.redact import MASK, Redactor
from toolkit.text.units import shortened

_LONGEST_TEXT = 200
"""Longest `found` or `fix` shown, in characters."""

_NO_DEFAULT = ("model.config", "model.hub", "cluster.gpu")
"""Settings without which the default says nothing about the others."""


@dataclass(frozen=True)
class Examined:
    """What is wrong in a recipe, and as much of it as can be checked further."""

    usable: Recipe | None
    """The recipe, with placeholders for its wrong settings; None where nothing is left."""
    problems: tuple[Problem, ...]
    """Every mistake found, in file order; with none, `usable` is the recipe as written."""
    wrong: frozenset[str] = frozenset()
    """Dotted keys of the settings that `usable` does not hold as they were meant."""
    guessed: frozenset[str] = frozenset()
    """Those of them whose placeholder says nothing: rules that read them were skipped."""

    def meant(self, key: str) -> bool:
        """Whether `usable` has this setting, all around it and all in it as it was meant."""
        return not any(_touch(key, other) for other in self.wrong)


def load_recipe(
    path: str | Path, overrides: str | Sequence[str] = (), cluster: str | Cluster | None = None
) -> Recipe:
    """Read, merge and check the recipe at `path`, or the shipped one of that name.

    `overrides` are `KEY.PATH=VALUE` texts, or one, put on top in order; `cluster` replaces the
    recipe's own, in the words of `--cluster`. Paths in the recipe are absolute afterwards:
    those in a file are relative to it, those in an override to the working directory.

    Raises RecipeError with every mistake found, in file order: the recipe's own lines,
    then those of the files it extends, then overrides. Secrets are masked in it.
    """
    section = {} if cluster is None else {"groups": []} | find_cluster(cluster).section
    there = [f"cluster.{key}={value}" for key, value in section.items()]
    stated = [overrides] if isinstance(overrides, str) else overrides
    examined = examine(Path(path), [*stated, *there])
    if examined.problems or examined.usable is None:
        raise RecipeError(examined.problems)
    return examined.usable


def examine(path: Path, overrides: Sequence[str] = ()) -> Examined:
    """As `load_recipe`, but returns the mistakes together with what can be checked further."""
    redactor = Redactor()
    try:
        layers = read_layers(path, overrides)
    except RecipeError as error:
        return Examined(None, tuple(_presentable(error.problems, (), redactor)))
    secrets = [p for tree in layers.trees for p in _secrets(tree, "", redactor)]
    recipe, explained = None, list[Explained]()
    try:
        recipe = Recipe.model_validate(yaml_nodes.to_data(layers.root))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        explained = explain(details, layers.root)
    stated = [*secrets, *layers.problems, *(item.problem for item in explained)]
    wrong = {key for item in explained for key in item.blames}
    wrong.update(problem.key for problem in stated)
    # Without an unknown key, its section is as meant, unless the key stands for another.
    unknown = {item.problem.key for item in explained if item.problem.found == UNKNOWN_KEY}
    usable, joined, wrong, guessed = _rounds(layers.root, recipe, wrong, wrong - unknown)
    problems = [*stated, *(_placed(problem, layers.root) for problem in joined)]
    shown = tuple(_presentable(problems, layers.files, redactor))
    return Examined(usable, shown, frozenset(wrong), frozenset(guessed))


def refused_value(
    path: Path, overrides: Sequence[str], key: str, stated: yaml_nodes.YamlEntry
) -> Problem | None:
    """What the schema finds wrong when another file states a value for a setting of a recipe.

    `stated`: the value, and the place of the key, in that file. Settings that disagree are not
    looked for. Raises RecipeError as `read_layers`.
    """
    above = layer_of(key, stated)
    root = merge(read_layers(path, overrides).root, above)
    try:
        Recipe.model_validate(yaml_nodes.to_data(root))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        found = [one.problem for one in explain(details, root)]
        ours = [one for one in found if one.file == stated.place.file]
        return _presentable(ours, (), Redactor())[0] if ours else None
    return None


def _rounds(
    root: yaml_nodes.Mapping, recipe: Recipe | None, wrong: set[str], guessed: set[str]
) -> tuple[Recipe | None, list[Problem], set[str], set[str]]:
    """Apply the rules until they find nothing new: what breaks a rule gets its default, because
    it may hide another mistake; rules that read a setting without one are skipped.

    Returns the recipe that is left, the problems, its wrong settings and the skipped ones.
    """
    found: list[Problem] = []
    if recipe is None or wrong:
        recipe, replaced = repaired(yaml_nodes.to_data(root), wrong)
        guessed |= replaced - wrong
        wrong = wrong | replaced
    while recipe is not None:
        new = [
            problem
            for problem in broken_rules(recipe, guessed, hidden=bool(found))
            if not any(_touch(problem.key, key) for key in wrong)
        ]
        if not new:
            break
        found += new
        keys = {problem.key for problem in new}
        wrong |= keys
        recipe, replaced = repaired(yaml_nodes.to_data(root), wrong)
        wrong |= replaced
        guessed |= replaced | {key for key in keys if key.startswith(_NO_DEFAULT)}
    return recipe, found, wrong, guessed


def _touch(key: str, other: str) -> bool:
    """Whether one of two settings is the other, or a part of it."""
    return is_inside(key, other) or is_inside(other, key)


def _secrets(node: yaml_nodes.Node, key: str, redactor: Redactor) -> Iterator[Problem]:
    """Credentials anywhere in a file's tree; the values themselves are never shown."""
    if isinstance(node, yaml_nodes.Mapping):
        for name, entry in node.entries.items():
            yield from _secrets(entry.node, f"{key}.{name}" if key else name, redactor)
    elif isinstance(node, yaml_nodes.Sequence):
        for index, item in enumerate(node.items):
            yield from _secrets(item, f"{key}[{index}]", redactor)
    else:
        # The text as written: a value that is a path has been made absolute.
        value = node.text if isinstance(node.value, str) else node.value
        if redactor.looks_secret(key, value):
            fix = "remove it and set the environment variable (HF_TOKEN, WANDB_API_KEY) instead"
            yield Problem(key, MASK, "no credentials in a recipe", fix, *node.place)


def placed(problem: Problem, path: Path, overrides: Sequence[str]) -> Problem:
    """A problem that was found after loading, with its place in the recipe at `path` unless
    it is in another file; secrets masked."""
    redacted = replace(problem, found=Redactor().redact(problem.found))
    if problem.file:
        return redacted
    return _placed(redacted, read_layers(path, overrides).root)


def _placed(problem: Problem, root: yaml_nodes.Mapping) -> Problem:
    file, line = place_of(parts_of(problem.key), root)
    return replace(problem, file=file, line=line)


def _presentable(
    problems: Iterable[Problem], files: Sequence[str], redactor: Redactor
) -> list[Problem]:
    """One problem per setting, in file order, short, with secrets masked."""
    first: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.key, problem.file), problem)
    rank = {file: index for index, file in enumerate(files)}
    ordered = sorted(first.values(), key=lambda p: (rank.get(p.file, 0), p.line))
    if more := ordered[MAX_PROBLEMS:]:
        unknown = sum(problem.found == UNKNOWN_KEY for problem in more)
        found = f"{len(more):,} more problems, {unknown:,} of them unknown keys"
        last = Problem(
            WHOLE_FILE, found, "none", "is this a recipe?", more[0].file, more[0].line
        )
        ordered = [*ordered[:MAX_PROBLEMS], last]
    return [
        replace(
            problem,
            key=shortened(redactor.redact(problem.key), _LONGEST_TEXT),
            found=shortened(redactor.redact(problem.found), _LONGEST_TEXT),
            allowed=redactor.redact(problem.allowed),
            fix=shortened(redactor.redact(problem.fix), _LONGEST_TEXT),
        )
        for problem in ordered
    ]
