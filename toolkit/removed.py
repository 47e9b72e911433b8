"""Settings and commands of earlier releases that are gone, and what to do instead.

Recipes and scripts outlive a release: a name that was removed ends in one error that names its
replacement, and an old run whose stored recipe leaves the setting unset continues. The names
are rows of `removed.yaml`, which is read when an unknown name is met.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Removed:
    """The rows of `removed.yaml`: what to do instead of each name."""

    settings: Mapping[str, str]
    """By dotted path without indices."""
    defaults: Mapping[str, object]
    """Defaults of removed settings, where they were not null."""
    values: Mapping[str, Mapping[str, str]]
    """By setting and value."""
    commands: Mapping[str, str]
    """By command (`data stats`) or option (`launch --option`)."""


@cache
def removed() -> Removed:
    """All removed names."""
    from ruamel.yaml import YAML  # slow to import, and most commands have no such name

    rows = YAML(typ="safe").load(Path(__file__).with_suffix(".yaml"))
    settings, defaults = {}, {}
    for path, row in rows["settings"].items():
        is_map = isinstance(row, dict)
        settings[path] = row["instead"] if is_map else row
        if is_map:
            defaults[path] = row["default"]
    return Removed(settings, defaults, rows["values"], rows["commands"])


def without_unset(stated: Any, prefix: str = "") -> Any:
    """A stated recipe without the removed settings that are null or at what was their default.

    Lists keep their order. What is neither a map nor a list is returned as it is.
    """
    if isinstance(stated, Mapping):
        paths = {key: f"{prefix}.{key}" if prefix else str(key) for key in stated}
        return {
            key: without_unset(value, paths[key])
            for key, value in stated.items()
            if paths[key] not in removed().settings or not _is_unset(paths[key], value)
        }
    if isinstance(stated, list):
        return [without_unset(one, prefix) for one in stated]
    return stated


def _is_unset(path: str, value: object) -> bool:
    """Whether a value is null or the former default. For a section, whether every value is."""
    default = removed().defaults.get(path)
    if isinstance(default, Mapping) and isinstance(value, Mapping):
        return all(key in default and _same(default[key], value[key]) for key in value)
    return value is None or _same(default, value)


def _same(default: object, value: object) -> bool:
    """Whether a value equals the default. `true` does not equal 1."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def removed_command(arguments: Sequence[str]) -> tuple[str, str] | None:
    """The removed command or option in a command line (without `dmt`), and what to do instead.
    None if there is none."""
    words = (one.replace("=", " ", 1) if one.startswith("-") else one for one in arguments)
    text = f" {' '.join(words)} "
    for name, instead in removed().commands.items():
        verb, dashes, option = name.partition(" --")
        if text.startswith(f" {verb} ") and (not dashes or f" --{option} " in text):
            return name, instead
    return None
