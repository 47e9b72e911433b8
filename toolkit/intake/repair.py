"""A recipe with placeholders for what is wrong in it, so that the rest can be checked."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from toolkit.intake.explain import dotted, parts_of, path_of
from toolkit.recipe.schema import Recipe

_MOST_ROUNDS = 40
"""Validations of one recipe: a dropped setting may be a required one of a deep map."""
_SOURCE = {"kind": "text", "files": ["placeholder"]}
PLACEHOLDERS: dict[str, Any] = {
    "name": "placeholder",
    "model": {},
    "data": {},
    "train": _SOURCE,
    "files": ["placeholder"],
    "path": "placeholder",
    "prefix": "placeholder",
    "training": {},
    "sequence_length": 2,
    "global_batch_size": 1,
    "optimizer": {},
    "learning_rate": 1.0,
    "parameters": ["*"],
    "rank": 1,
    "alpha": 1.0,
    "like": "h100-80gb",
}
"""A valid value of every required setting, by the last part of its name."""


def repaired(data: Any, wrong: Iterable[str]) -> tuple[Recipe | None, set[str]]:
    """The recipe without its `wrong` settings (dotted keys), and the keys of the settings
    that were replaced to make the rest valid; None where nothing valid is left."""
    replaced: set[str] = set()
    for key in wrong:
        _drop(data, parts_of(key))
    for _ in range(_MOST_ROUNDS):
        try:
            return Recipe.model_validate(data), replaced
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_context=False):
                path = path_of(detail["loc"])
                replaced.add(dotted(path))
                _replace(data, path, detail["type"])
    return None, replaced


def _replace(data: Any, path: list[str | int], error: str) -> None:
    """Drop a setting; put a placeholder where it is missing or is a source of no kind."""
    if error == "missing" and path and isinstance(path[-1], str):
        _put(data, path, PLACEHOLDERS.get(path[-1]))
    elif error.startswith("union_tag"):
        _put(data, path, _SOURCE)
    else:
        _drop(data, path)


def _put(data: Any, path: Sequence[str | int], value: Any) -> None:
    parent, last = _at(data, path[:-1]), path[-1]
    within = isinstance(parent, list) and isinstance(last, int) and last < len(parent)
    if isinstance(parent, dict) or within:
        parent[last] = dict(value) if isinstance(value, dict) else value


def _drop(data: Any, path: Sequence[str | int]) -> None:
    """Remove a setting; of a list with a wrong item, the whole list."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    parent = _at(data, path[:-1])
    if path and isinstance(parent, dict):
        parent.pop(path[-1], None)


def _at(data: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data
