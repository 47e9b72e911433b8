"""A recipe file → a frozen, checked `Recipe`, or every mistake at once.

read_layers   files, `extends`, `--set`, relative paths   (layers.py, yaml_nodes.py)
explain       types, ranges, unknown and missing keys     (schema.py, explain.py)
broken_rules  settings that disagree                      (checks.py)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.errors import Problem, RecipeError
from toolkit.intake.checks import broken_rules
from toolkit.recipe import yaml_nodes
from toolkit.recipe.explain import (
    MAX_PROBLEMS,
    UNKNOWN_KEY,
    Explained,
    explain,
    parts_of,
    place_of,
)
from toolkit.recipe.layers import read_layers
from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_nodes import WHOLE_FILE
from toolkit.redact import MASK, Redactor

_LONGEST_TEXT = 200
"""Longest `found` or `fix` shown, in characters."""

_STAND_IN: dict[str, Any] = {
    "name": "stand-in",
    "model": {},
    "data": {"train": {"kind": "text", "files": ["stand-in"]}},
    "training": {"sequence_length": 2, "global_batch_size": 1},
    "optimizer": {"learning_rate": 1.0},
}
"""Placeholder of wrong required settings while the other rules run."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and check the recipe at `path`.

    `overrides` are `KEY.PATH=VALUE` texts, put on top in order. Paths in the recipe are
    absolute afterwards: those in a file are relative to it, those in an override to the
    working directory.

    Raises RecipeError with every mistake found, in file order: the recipe's own lines,
    then those of the files it extends, then overrides. Secrets are masked in it.
    """
    redactor = Redactor()
    try:
        layers = read_layers(path, overrides)
    except RecipeError as error:
        raise RecipeError(_presentable(error.problems, (), redactor)) from None
    secrets = [p for tree in layers.trees for p in _secrets(tree, "", redactor)]
    recipe, wrong = _validate(layers.root)
    stated = [*secrets, *layers.problems, *(item.problem for item in wrong)]
    blamed = {key for item in wrong for key in item.blames}
    blamed.update(problem.key for problem in stated)
    usable = recipe or _usable_part(layers.root, blamed)
    joined = list(broken_rules(usable, blamed)) if usable else []
    problems = [*stated, *(_placed(problem, layers.root) for problem in joined)]
    if problems or recipe is None:
        raise RecipeError(_presentable(problems, layers.files, redactor))
    return recipe


def _validate(root: yaml_nodes.Mapping) -> tuple[Recipe | None, list[Explained]]:
    try:
        return Recipe.model_validate(yaml_nodes.to_data(root)), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        return None, explain(details, root)


def _usable_part(root: yaml_nodes.Mapping, wrong: Iterable[str]) -> Recipe | None:
    """The recipe without its wrong settings, so that the rules on the rest can run."""
    data = yaml_nodes.to_data(root)
    for key in wrong:
        parts = key.partition("[")[0].split(".")
        if parts[:2] in (["data", "train"], ["data", "validation"]):
            parts = parts[:2]  # half a source is of no use
        _drop(data, parts)
    _fill(data, _STAND_IN)
    try:
        return Recipe.model_validate(data)
    except ValidationError:
        return None


def _drop(data: dict[str, Any], parts: Sequence[str]) -> None:
    for part in parts[:-1]:
        child = data.get(part)
        if not isinstance(child, dict):
            return
        data = child
    data.pop(parts[-1], None)


def _fill(data: dict[str, Any], stand_in: dict[str, Any]) -> None:
    for key, value in stand_in.items():
        if isinstance(data.get(key), dict) and key != "train":
            _fill(data[key], value)
        elif key not in data:
            data[key] = value


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
            key=_short(redactor.redact(problem.key)),
            found=_short(redactor.redact(problem.found)),
            allowed=redactor.redact(problem.allowed),
            fix=_short(redactor.redact(problem.fix)),
        )
        for problem in ordered
    ]


def _short(text: str) -> str:
    """Not longer than a terminal is wide a few times over."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
