"""Names in recipes: shipped recipes, files of this machine, URLs."""

import os
import re
from pathlib import Path

_TASKS = re.compile(r"^tasks:\n(?:(?: .*|#.*)?\n)*", re.MULTILINE)
_TASK = re.compile(r"^  ([a-z]+):", re.MULTILINE)
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
    """The names under `tasks` in the file of a size, e.g. `llama-3.1-8b.yml`."""
    text = _TASKS.search(size.read_text(encoding="utf-8"))
    return _TASK.findall(text[0]) if text else []


def composed_of(path: Path) -> tuple[Path, str] | None:
    """The file of the size and the task of a recipe that is no file, e.g.
    `llama-3.1-8b-lora.yaml`; None for any other."""
    size, _, task = path.name.removesuffix(".yaml").rpartition("-")
    file = path.with_name(f"{size}.yml")
    if path.suffix != ".yaml" or not size or os.path.lexists(path) or not file.is_file():
        return None
    return (file, task) if task in tasks_of(file) else None


def shipped_recipes() -> dict[str, Path]:
    """The shipped recipes by their names, e.g. `llama-3.1-8b-pretrain`."""
    composed = (
        size.with_name(f"{size.stem}-{task}.yaml")
        for size in RECIPES.glob("*/*.yml")
        for task in tasks_of(size)
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
        whole = named.with_name(f"{named.name}.yaml")
        return whole if whole.is_file() or composed_of(whole) else named
    if path.name != text or path.suffix in (".yaml", ".yml") or os.path.lexists(path):
        return path
    return shipped_recipes().get(text, path)
