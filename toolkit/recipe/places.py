"""What a recipe's text names: something on this machine, or a URL."""

import os
import re
from pathlib import Path

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(text: str) -> bool:
    """A URL, e.g. `s3://bucket/data`: read through fsspec, and never joined to a folder."""
    return _SCHEME.match(text) is not None


RECIPES = (Path(__file__).parents[1] / "recipes").resolve()
"""The shipped recipes: `recipes/` of the checkout (`toolkit/recipes` is a link to it); in an
installed package, the same files as package data."""
SHIPPED = "recipes:"
"""Prefix of a path in `RECIPES`, e.g. in `extends: recipes:llama/llama-3.1-8b.yml`."""


def shipped_recipes() -> dict[str, Path]:
    """The shipped recipes by their names, e.g. `llama-3.1-8b-pretrain`."""
    files = sorted(RECIPES.glob("*/*.yaml"), key=lambda file: (file.parent.name, file.stem))
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
        return whole if whole.is_file() else named
    if path.name != text or path.suffix in (".yaml", ".yml") or os.path.lexists(path):
        return path
    return shipped_recipes().get(text, path)
