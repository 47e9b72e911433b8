"""Detects the format of a file, and reads its settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.errors import Problem, RecipeError
from toolkit.foreign.base import SettingSource, Target, targets
from toolkit.recipe import yaml_nodes
from toolkit.recipe.schema import Recipe


def read_source(path: Path, recipe: Recipe) -> SettingSource:
    """The settings of the file at `path`, in any of `targets()`.

    Raises RecipeError if it cannot be read or its format is unknown.
    """
    target, file = recognised(path, "--against")
    return target.read(file, recipe)


def recognised(path: Path, option: str) -> tuple[Target, JsonFile]:
    """The format of the file at `path`, and what stands in it.

    Raises RecipeError, on `option`, if it cannot be read or its format is unknown.
    """
    try:
        text = _text(path)
        if path.suffix.lower() in (".yaml", ".yml"):  # which may also begin with a brace
            return _by_names(_read_yaml(path, text))
        if text.lstrip().startswith("{"):
            return _by_names(read_json(path, "JSON file"))
        for target in targets():
            if (file := target.parse(text, path)) is not None:
                return target, file
        raise _NoKind("a text without `--flags`")
    except _NoKind as error:
        environment = ", or `env`" if option == "--against" else ""
        forms = (target.form for target in targets())
        kinds = ", ".join(forms) + environment
        problem = Problem(option, str(error), kinds, "", str(path))
        raise RecipeError([problem]) from error


class _NoKind(Exception):
    """Why a file is of no known format."""


def _by_names(file: JsonFile) -> tuple[Target, JsonFile]:
    """By whose names its top-level keys are, most of them."""
    best = max(targets(), key=lambda target: target.score(file.values))
    if best.score(file.values) > 0:
        return best, file
    if {"model", "training", "data", "extends"} & file.values.keys():
        raise _NoKind("a recipe")
    raise _NoKind(f"settings {', '.join(list(file.values)[:5]) or 'none'}")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(yaml_nodes.MAX_BYTES + 1)
        if len(data) > yaml_nodes.MAX_BYTES:
            raise _NoKind(f"more than {yaml_nodes.MAX_BYTES // 1024} KiB")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise _NoKind(error.strerror or str(error)) from error
    except ValueError as error:  # not UTF-8, or a null character in the path
        raise _NoKind(str(error)) from error


def _read_yaml(path: Path, text: str) -> JsonFile:
    """A YAML map with the line of each key, in the form of a JSON file."""
    node, problems = yaml_nodes.parse(text, str(path), is_foreign=True)
    if problems:
        raise RecipeError(problems)
    if not isinstance(node, yaml_nodes.Mapping):
        raise _NoKind("a YAML file that is no map")
    values: dict[str, Any] = yaml_nodes.to_data(node)
    return JsonFile(path, values, dict(_lines(node, "")))


def _lines(node: yaml_nodes.Mapping, prefix: str) -> Iterator[tuple[str, int]]:
    for name, entry in node.entries.items():
        yield f"{prefix}{name}", entry.place.line
        if isinstance(entry.node, yaml_nodes.Mapping):
            yield from _lines(entry.node, f"{prefix}{name}.")
