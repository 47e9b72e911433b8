"""A recipe file → a frozen, checked `Recipe`, or every mistake at once.

read_layers   files, `extends`, `--set`, relative paths   (layers.py, yaml_nodes.py)
explain       types, ranges, unknown and missing keys     (schema.py, explain.py)
broken_rules  settings that disagree                      (checks.py)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from toolkit.errors import Problem, RecipeError
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.checks import broken_rules
from toolkit.intake.explain import (
    MAX_PROBLEMS,
    UNKNOWN_KEY,
    explain,
    parts_of,
    place_of,
)
from toolkit.intake.layers import layer_of, merge, read_layers
from toolkit.recipe import yaml_nodes
from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_nodes import WHOLE_FILE
from toolkit.text.redact import MASK, Redactor
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
    section = {} if cluster is None else {"groups": []} | find_cluster(cluster).section
    there = [f"cluster.{key}={value}" for key, value in section.items()]
    stated = [overrides] if isinstance(overrides, str) else overrides
    redactor, problems, files = Redactor(), list[Problem](), tuple[str, ...]()
    try:
        layers = read_layers(Path(path), [*stated, *there])
        problems += (
            problem for tree in layers.trees for problem in _secrets(tree, "", redactor)
        )
        problems += layers.problems
        files = layers.files
        recipe = Recipe.model_validate(yaml_nodes.to_data(layers.root))
        if not problems:
            problems += (_placed(one, layers.root) for one in broken_rules(recipe))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        problems += explain(details, layers.root)
    except RecipeError as error:
        problems += error.problems
    if problems:
        raise RecipeError(_presentable(problems, files, redactor))
    return recipe


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
        ours = [one for one in explain(details, root) if one.file == stated.place.file]
        return _presentable(ours, (), Redactor())[0] if ours else None
    return None


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
