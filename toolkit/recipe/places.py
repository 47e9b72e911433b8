"""Names in recipes: shipped recipes, files of this machine, URLs."""

import glob
import os
import re
from pathlib import Path
from typing import Any

from toolkit.errors import RecipeError
from toolkit.recipe import yaml_text
from toolkit.system.untrusted import read_bytes

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(text: str) -> bool:
    """A URL, e.g. `s3://bucket/data`: read through fsspec, and never joined to a folder."""
    return _SCHEME.match(text) is not None


RECIPES = (Path(__file__).parents[1] / "recipes").resolve()
"""The shipped recipes: `recipes/` of the checkout (`toolkit/recipes` is a link to it). In an
installed package, the same files as package data."""
SHIPPED = "recipes:"
"""Prefix of a path in `RECIPES`, e.g. in `extends: recipes:llama/llama-3.1-8b.yml`."""


def tasks_of(size: Path) -> list[str]:
    """The names under `tasks` in the file of a size, e.g. `llama-3.1-8b.yml`. Empty for a file
    that cannot be read."""
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
    `llama-3.1-8b-lora.yaml`, where it is no file. None for any other."""
    if path.suffix != ".yaml" or os.path.lexists(path):
        return None
    near = sorted(path.parent.glob("*.yml"), key=lambda size: len(size.stem), reverse=True)
    found = [
        (size, path.stem.removeprefix(f"{size.stem}-"))
        for size in near
        if path.stem.startswith(f"{size.stem}-")
    ]
    stated = (one for one in found if one[1] in tasks_of(one[0]))
    return next(stated, found[0] if found else None)


def composed_names(size: Path) -> list[str]:
    """The recipes of a size, e.g. `llama-3.1-8b-lora.yaml`."""
    return [f"{size.stem}-{task}.yaml" for task in tasks_of(size)]


def recipes_in(folder: Path) -> list[Path]:
    """The recipes of a folder, in order: its files, and those that sizes compose."""
    composed = (folder / name for size in folder.glob("*.yml") for name in composed_names(size))
    return sorted({*folder.glob("*.yaml"), *composed}, key=lambda file: file.stem)


def shipped_recipes() -> dict[str, Path]:
    """The shipped recipes by their names, e.g. `llama-3.1-8b-pretrain`."""
    folders = sorted(folder for folder in RECIPES.iterdir() if folder.is_dir())
    files = [file for folder in folders for file in recipes_in(folder)]
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


_PATH_BEGINNINGS = ("./", "../", "/", "~")
_DATA_SUFFIXES = (".json", ".jsonl", ".parquet", ".txt", ".gz", ".zst")
_SOURCES = ("data.train", "data.validation")
_GLOBS = {f"{source}.files" for source in _SOURCES}
_ROWS = {f"{source}.path" for source in _SOURCES}
_FILES = {
    *("model.checkpoint", "parallel.zero.nvme_path"),
    *(f"{source}.prefix" for source in _SOURCES),
    *_GLOBS,
}
"""Settings that always name a file or folder, if not a URL."""
_FILES_OR_IDS = {
    *("model.hub", "data.tokenizer", "data.chat_template", "parallel.zero.config"),
    *_ROWS,
}
"""Settings that may also be a hub id, a preset or a text."""
_WORDS = {"model.hub": "bytes", "data.tokenizer": "bytes", "data.chat_template": "chatml"}
"""A value of a setting that never names a file."""


def located(value: Any, folder: Path, key: str = "") -> Any:
    """`value` with each path in it made absolute. A relative one starts at `folder`."""
    if isinstance(value, dict):
        inside = f"{key}." if key else ""
        return {name: located(one, folder, f"{inside}{name}") for name, one in value.items()}
    if isinstance(value, list):
        return [located(one, folder, key) for one in value]
    if not isinstance(value, str) or not _is_path(key, value, folder):
        return value
    folder = folder.absolute()
    if key in _GLOBS | _ROWS and not exists(folder / value):
        folder = Path(glob.escape(str(folder)))  # its own name is no glob
    try:
        return str(folder / Path(value).expanduser())
    except RuntimeError:  # `~someone` without a home directory
        return str(folder / value)


def _is_path(key: str, value: str, folder: Path) -> bool:
    """Whether the value of a setting names a file or folder of this machine."""
    if not value or is_remote(value):
        return False
    if key in _FILES:
        return not value.startswith("{stdlib}")
    if key not in _FILES_OR_IDS or value == _WORDS.get(key):
        return False
    if key == "data.chat_template":
        return "{" not in value  # otherwise the template itself
    if key in _ROWS and (value.endswith(_DATA_SUFFIXES) or set("*?[") & set(value)):
        return True
    if value.startswith(_PATH_BEGINNINGS):
        return True
    file = folder / value
    if key == "parallel.zero.config":  # a preset may have the name of a folder
        return value.endswith(".json") or (exists(file) and file.is_file())
    return exists(file)


def exists(path: Path) -> bool:
    """Whether there is a file or folder of that name."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or characters that no path has
        return False
