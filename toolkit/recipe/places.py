"""Names in recipes: shipped recipes, files of this machine, URLs."""

import os
import re
from pathlib import Path

from toolkit.errors import RecipeError
from toolkit.recipe import yaml_text
from toolkit.system.untrusted import read_bytes

_LONGEST_NAME = 255
"""Bytes of a file's name, on every common file system."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(text: str) -> bool:
    """A URL, e.g. `s3://bucket/data`: read through fsspec, and never joined to a folder."""
    return _SCHEME.match(text) is not None


RECIPES = (Path(__file__).parents[1] / "recipes").resolve()
"""The shipped recipes: `recipes/` of the checkout (`toolkit/recipes` is a link to it); in an
installed package, the same files as package data."""
SHIPPED = "recipes:"
"""Prefix of a path in `RECIPES`, e.g. in `extends: recipes:llama/llama-3.1-8b.yml`."""


def tasks_of(size: Path) -> list[str]:
    """The names under `tasks` in the file of a size, e.g. `llama-3.1-8b.yml`; of a file that
    cannot be read, none."""
    try:
        data = read_bytes(size, yaml_text.MAX_BYTES)
        if b"tasks" not in data:
            return []
        stated, _ = yaml_text.parse(data.decode("utf-8-sig"), str(size))
    except (OSError, ValueError, RecipeError):
        return []
    tasks = stated.at(("tasks",))
    return [*tasks] if isinstance(tasks, dict) else []


def composed_of(path: Path) -> tuple[Path, str] | None:
    """The file of the size and the task that a recipe's name stands for, e.g.
    `llama-3.1-8b-lora.yaml`, where it is no file; None for any other."""
    if path.suffix != ".yaml" or len(path.name) > _LONGEST_NAME or os.path.lexists(path):
        return None
    words = path.stem.split("-")
    splits = (("-".join(words[:n]), "-".join(words[n:])) for n in range(len(words) - 1, 0, -1))
    near = [(path.with_name(f"{size}.yml"), task) for size, task in splits]
    try:
        found = [(size, task) for size, task in near if size.is_file()]
    except OSError:  # a folder that may not be read
        return None
    stated = (one for one in found if one[1] in tasks_of(one[0]))
    return next(stated, found[0] if found else None)


def composed_names(size: Path) -> list[str]:
    """The recipes of a size, e.g. `llama-3.1-8b-lora.yaml`."""
    return [f"{size.stem}-{task}.yaml" for task in tasks_of(size)]


def shipped_recipes() -> dict[str, Path]:
    """The shipped recipes by their names, e.g. `llama-3.1-8b-pretrain`."""
    composed = (
        size.with_name(name)
        for size in RECIPES.glob("*/*.yml")
        for name in composed_names(size)
    )
    found = [*RECIPES.glob("*/*.yaml"), *composed]
    files = sorted(found, key=lambda file: (file.parent.name, file.stem))
    names = [file.stem for file in files]
    return {
        file.stem if names.count(file.stem) == 1 else f"{file.parent.name}/{file.stem}": file
        for file in files
    }


def find_recipe(path: Path) -> Path:
    """The file that `path` names: itself or, where there is none, a shipped recipe."""
    text = str(path)
    if text.startswith(SHIPPED):
        named = RECIPES / text.removeprefix(SHIPPED)
        if named.suffix in (".yaml", ".yml"):
            return named
        whole = named.parent / f"{named.name}.yaml"
        return whole if os.path.lexists(whole) or composed_of(whole) else named
    if path.name != text or path.suffix in (".yaml", ".yml") or os.path.lexists(path):
        return path
    return shipped_recipes().get(text, path)
