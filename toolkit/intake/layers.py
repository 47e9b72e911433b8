"""From a recipe file to what it states: reading, `extends`, `--set`, relative paths.

Each file is a layer on top of those that it extends, of which a later one is on top of
an earlier one, with the overrides of the command line on top of all.
"""

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from os.path import normpath
from pathlib import Path
from typing import Any, TypeVar

from toolkit.errors import Problem, RecipeError
from toolkit.recipe import yaml_text
from toolkit.recipe.places import (
    RECIPES,
    SHIPPED,
    composed_names,
    composed_of,
    find_recipe,
    is_remote,
    shipped_recipes,
)
from toolkit.recipe.yaml_text import TOP, WHOLE_FILE, KeyPath, Location, Stated
from toolkit.text.dotted import leaves, put
from toolkit.text.suggest import closest

OVERRIDE_FILE = "--set"
"""Stands for the file in problems of command-line overrides."""
MAX_FILES = 16
"""Most files that a recipe may be made of."""

_TAGS = ("kind", "model_type")
"""Keys that say what the other keys of their map mean."""
_PATH_BEGINNINGS = ("./", "../", "/", "~")
_DATA_SUFFIXES = (".json", ".jsonl", ".parquet", ".txt", ".gz", ".zst")


@dataclass(frozen=True)
class Layers:
    """Everything that was read for one recipe."""

    merged: Stated
    """The whole recipe, without `extends`."""
    each: tuple[Stated, ...]
    """The files, the lowest first, and then the overrides."""
    problems: tuple[Problem, ...]
    """Mistakes that did not stop reading."""
    files: tuple[str, ...]
    """File names as shown in problems, the recipe itself first, `--set` last."""


def read_layers(path: Path, overrides: Sequence[str]) -> Layers:
    """Read a recipe, the files that it extends, and the overrides; a name without a file is
    that of a shipped recipe.

    Raises RecipeError when a file cannot be read or is no YAML map.
    """
    path = find_recipe(path)
    reader = _Files([], [])
    reader.read(path, (), Problem(WHOLE_FILE, "", "a readable file", file=str(path)))
    # A file that two others extend is below both: its last place counts.
    layers = dict(reversed(reader.layers))
    files = (*reversed(layers), OVERRIDE_FILE)
    if overrides:
        layers[OVERRIDE_FILE] = _overrides(overrides, reader.problems)
    each = tuple(layers.values())
    return Layers(reduce(merge, each), each, tuple(reader.problems), files)


def merge(below: Stated, above: Stated) -> Stated:
    """`above` on top of `below`: maps deeply, lists and values replaced.

    A map whose `kind` (or `model_type`) differs replaces the other whole, because the
    rest of its keys then mean something else.
    """
    places = {**below.places, **above.places}
    left = {key: one for key, one in below.written.items() if not above.states(key)}
    written = {**left, **above.written}
    return Stated(_merged(below.data, above.data), places, written)


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if any(tag in below and tag in above and below[tag] != above[tag] for tag in _TAGS):
        return above
    shared = {key: _merged(below[key], one) for key, one in above.items() if key in below}
    return {**below, **above, **shared}


def stated_in(path: Path, overrides: Sequence[str]) -> dict[str, str]:
    """Dotted name of every setting that a recipe states → the file, or `--set`, that states
    it; the recipe's own settings first, then those of the files that it extends.

    Raises RecipeError when a file cannot be read.
    """
    layers = read_layers(path, overrides)
    found = {
        key: layers.merged.place(tuple(key.split("."))).file
        for key, _ in leaves(layers.merged.data)
    }
    own = (layers.files[0], OVERRIDE_FILE)
    return dict(sorted(found.items(), key=lambda one: one[1] not in own))


def places_of(path: Path, overrides: Sequence[str]) -> dict[str, str]:
    """Dotted name of every setting that a recipe states → `FILE:LINE`, or `--set`.

    Raises RecipeError when a file cannot be read.
    """
    merged = read_layers(path, overrides).merged
    places = {key: merged.place(tuple(key.split("."))) for key, _ in leaves(merged.data)}
    return {key: f"{at.file}:{at.line}" if at.line else at.file for key, at in places.items()}


@dataclass(frozen=True)
class _Files:
    """The files of one recipe as they are read."""

    layers: list[tuple[str, Stated]]
    problems: list[Problem]

    def read(self, path: Path, chain: tuple[Path, ...], origin: Problem) -> None:
        """Append what a file states, then the files that it extends, the last one first.

        `chain`: the files that led to this one. `origin` is the place to blame when it cannot
        be read.
        """
        if composed := composed_of(path):
            self.compose(path, *composed, chain, origin)
            return
        name = normpath(path) if chain else str(path)
        self.add(path, self.parsed(path, name, origin), chain, origin)

    def parsed(self, path: Path, name: str, origin: Problem) -> Stated:
        """What a file states, a map."""
        text = self.text(path, name, origin)
        try:
            stated, problems = yaml_text.parse(text, name)
        except RecipeError as error:
            raise RecipeError([*self.problems, *error.problems]) from None
        self.problems.extend(problems)
        if not isinstance(stated.data, dict):
            found, fix = stated.text(()), "write `key: value` lines"
            if stated.data is None:
                found, fix = "an empty file", "copy a recipe from recipes/ and change it"
            here = Problem(TOP, "", "", file=name, line=stated.places[()].line)
            raise self.stop(here, found, "a map of settings", fix)
        return stated

    def add(self, path: Path, stated: Stated, chain: tuple[Path, ...], origin: Problem) -> None:
        """Append what was read of a file, then the files that it extends."""
        data, taken = stated.data, {"extends"}
        if path.suffix == ".yml" and "tasks" in data:
            self.check_tasks(path, stated, is_extended=bool(chain))
            taken.add("tasks")  # recipes by themselves
        own = {key: value for key, value in data.items() if key not in taken}
        name = stated.places[()].file
        self.push(name, replace(stated, data=_located(own, path.parent)), origin)
        if "extends" in data:
            for parent, origin in reversed(self.extended(stated, path, (*chain, path))):
                self.read(parent, (*chain, path), origin)

    def push(self, name: str, stated: Stated, origin: Problem) -> None:
        if len(self.layers) == MAX_FILES:
            allowed = f"at most {MAX_FILES}"
            raise self.stop(origin, "more files", allowed, "extend fewer files")
        self.layers.append((name, stated))

    def check_tasks(self, path: Path, stated: Stated, *, is_extended: bool) -> None:
        """Report what cannot be a task of a size, and refuse a size as a run."""
        tasks = stated.data["tasks"]
        if isinstance(tasks, dict) and not is_extended:
            at = Problem("tasks", "", "", "", *stated.place(("tasks",)))
            names = ", ".join(normpath(path.with_name(one)) for one in composed_names(path))
            found = "a size of a model, which is no run"
            fix = f"name one of {names}" if names else "name a recipe that extends it"
            raise self.stop(at, found, "a recipe", fix)
        wrong: list[tuple[KeyPath, str]] = []
        if isinstance(tasks, dict):
            wrong = [
                (("tasks", task), "a map of settings")
                for task, value in tasks.items()
                if not isinstance(value, dict | None)
            ]
        elif tasks is not None:
            wrong = [(("tasks",), "a map of tasks")]
        for key, allowed in wrong:
            found, fix = stated.text(key), f"write `{key[-1]}: {{…}}`, or remove it"
            place = stated.place(key)
            self.problems.append(Problem(yaml_text.dotted(key), found, allowed, fix, *place))

    def compose(
        self, path: Path, size: Path, task: str, chain: tuple[Path, ...], origin: Problem
    ) -> None:
        """The recipe SIZE-TASK: what the size's file states under `tasks`, on the size and what
        all recipes of the task share."""
        stated, inside = self.parsed(size, normpath(size), origin), ("tasks", task)
        if isinstance(stated.data.get("tasks"), dict | None) and not stated.states(inside):
            raise self.stop(
                origin, f"no file {normpath(path)}", "an existing file", _similar(path)
            )
        settings, place = stated.at(inside), stated.place(inside)
        data = {"name": path.stem, **(settings if isinstance(settings, dict) else {})}
        own = Stated(
            _located(data, path.parent),
            {(): place, ("name",): place, **_inside(inside, stated.places)},
            {("name",): path.stem, **_inside(inside, stated.written)},
        )
        self.push(normpath(path), own, origin)
        self.add(size, stated, (*chain, path), origin)
        base = Path("base") / f"{task}.yml"
        beside = path.parent.parent / base
        origin = Problem(yaml_text.dotted(inside), "", "", "", *place)
        self.read(beside if _exists(beside) else RECIPES / base, (*chain, path), origin)

    def text(self, path: Path, name: str, origin: Problem) -> str:
        try:
            if not path.exists():
                raise self.stop(origin, f"no file {name}", "an existing file", _similar(path))
            if not path.is_file():
                found = f"{name}, which is no regular file"
                raise self.stop(origin, found, "a YAML file", "name a file")
            with path.open("rb") as file:
                data = file.read(yaml_text.MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            found = f"{name}: {reason}"
            raise self.stop(origin, found, "a readable file", "check name and rights") from None
        if len(data) > yaml_text.MAX_BYTES:
            limit = f"at most {yaml_text.MAX_BYTES // 1024} KiB"
            found = f"{name} of {path.stat().st_size / 1024:,.0f} KiB"
            fix = "name a recipe: this file is too large to be one"
            raise self.stop(origin, found, limit, fix)
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            fix = "save the file as UTF-8 text" if b"\0" not in data else "is this a recipe?"
            here = Problem(WHOLE_FILE, "", "", file=name, line=line)
            raise self.stop(here, "bytes that are no UTF-8", "UTF-8 text", fix) from None

    def extended(
        self, stated: Stated, path: Path, chain: Sequence[Path]
    ) -> list[tuple[Path, Problem]]:
        """The files named by `extends`, each with the place that names it."""
        named, parents = stated.data["extends"], []
        paths: list[KeyPath] = [("extends",)]
        if isinstance(named, list) and named:
            paths = [("extends", number) for number in range(len(named))]
        for here in paths:
            origin = Problem("extends", "", "", "", *stated.place(here))
            value = stated.at(here)
            if not isinstance(value, str) or not value:
                found, fix = stated.text(here), "extends: ../base/pretrain.yml"
                raise self.stop(origin, found, "a file name, or a list of them", fix)
            shipped = value.startswith(SHIPPED)
            parent = find_recipe(Path(value)) if shipped else path.parent / value
            if _real(parent) in map(_real, chain):
                circle = " → ".join(normpath(file) for file in [*chain, parent])
                found, fix = f"a cycle: {circle}", "break the cycle"
                raise self.stop(origin, found, "a chain that ends", fix)
            parents.append((parent, origin))
        return parents

    def stop(self, at: Problem, found: str, allowed: str, fix: str) -> RecipeError:
        problem = Problem(at.key, found, allowed, fix, at.file, at.line)
        return RecipeError([*self.problems, problem])


def _overrides(overrides: Sequence[str], problems: list[Problem]) -> Stated:
    """Read all `KEY.PATH=VALUE` texts; later ones win."""
    data: dict[str, Any] = {}
    places: dict[KeyPath, Location] = {(): Location(OVERRIDE_FILE, 0)}
    written: dict[KeyPath, str] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        parts: KeyPath = tuple(key.split("."))
        if not equals or not all(parts) or len(parts) > yaml_text.MAX_DEPTH:
            allowed, fix = "KEY.PATH=VALUE", "e.g. --set parallel.tensor=4"
            problems.append(Problem(OVERRIDE_FILE, text, allowed, fix, OVERRIDE_FILE))
        elif key == "extends":
            fix = "write it into the recipe file"
            problems.append(Problem("extends", text, "settings", fix, OVERRIDE_FILE))
        else:
            try:
                stated, found = yaml_text.parse(value, OVERRIDE_FILE, has_lines=False)
            except RecipeError as error:
                found = [*error.problems]
            else:
                put(data, key, stated.data)
                places |= dict.fromkeys((parts[:n] for n in range(len(parts))), places[()])
                places |= {(*parts, *path): one for path, one in stated.places.items()}
                written |= {(*parts, *path): one for path, one in stated.written.items()}
            problems.extend(replace(problem, key=key) for problem in found)
    return Stated(_located(data, Path.cwd()), places, written)


def _located(value: Any, folder: Path, key: str = "") -> Any:
    """The data with every setting that names a file or folder made absolute."""
    if isinstance(value, dict):
        inside = f"{key}." if key else ""
        return {name: _located(one, folder, f"{inside}{name}") for name, one in value.items()}
    if isinstance(value, list):
        return [_located(one, folder, key) for one in value]
    is_path = _PATHS.get(key)
    if is_path is None or not isinstance(value, str) or not value:
        return value
    if not is_path(value, folder):
        return value
    if is_path in (_is_glob, _is_local_data) and not _exists(folder / value):
        folder = Path(glob.escape(str(folder.absolute())))  # its own name is no glob
    try:
        return str(folder.absolute() / Path(value).expanduser())
    except RuntimeError:  # `~someone` without a home directory
        return str(folder.absolute() / value)


def _is_file_name(value: str, folder: Path) -> bool:  # noqa: ARG001 - one signature
    return not value.startswith("{stdlib}") and not is_remote(value)


def _is_glob(value: str, folder: Path) -> bool:
    return _is_file_name(value, folder)


def _is_local(value: str, folder: Path) -> bool:
    """A path rather than a hub id or a preset: by its beginning, or because it exists."""
    return value.startswith(_PATH_BEGINNINGS) or _exists(folder / value)


def _is_local_model(value: str, folder: Path) -> bool:
    return value != "bytes" and _is_local(value, folder)


def _is_local_data(value: str, folder: Path) -> bool:
    return not is_remote(value) and (
        value.endswith(_DATA_SUFFIXES)
        or bool(set("*?[") & set(value))
        or _is_local(value, folder)
    )


def _is_local_config(value: str, folder: Path) -> bool:
    if value.endswith(".json") or value.startswith(_PATH_BEGINNINGS):
        return True
    return _exists(folder / value) and (folder / value).is_file()


def _is_template_file(value: str, folder: Path) -> bool:  # noqa: ARG001 - one signature
    return value != "chatml" and "{" not in value


_PATHS: dict[str, Callable[[str, Path], bool]] = {
    "model.hub": _is_local_model,
    "model.checkpoint": _is_file_name,
    "data.tokenizer": _is_local_model,
    "data.cache": _is_file_name,
    "data.chat_template": _is_template_file,
    "parallel.zero.nvme_path": _is_file_name,
    "parallel.zero.config": _is_local_config,
    **{
        f"data.{part}.{key}": is_path
        for part in ("train", "validation")
        for key, is_path in (
            ("files", _is_glob),
            ("exclude", _is_glob),
            ("prefix", _is_file_name),
            ("path", _is_local_data),
        )
    },
}
"""Settings that may name a path, each with the test whether a value does."""


_One = TypeVar("_One")


def _inside(path: KeyPath, found: Mapping[KeyPath, _One]) -> dict[KeyPath, _One]:
    """What stands below a path, by the rest of its own."""
    end = len(path)
    return {key[end:]: one for key, one in found.items() if key[:end] == path and key[end:]}


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or characters that no path has
        return False


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of symbolic links
        return path


def _similar(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())[:1000]
    except OSError:
        return f"there is no folder {normpath(path.parent)}"
    if path.suffix != ".yml":  # a size is no run, its tasks are
        sizes = [name for name in names if name.endswith(".yml")][:100]
        composed = {name: composed_names(path.parent / name) for name in sizes}
        names = [name for name in names if not composed.get(name)]
        names += [name for of_size in composed.values() for name in of_size]
    close = closest(path.name, names)
    if shipped := closest(path.name, shipped_recipes()) if not close else "":
        return f"did you mean the shipped recipe `{shipped}`? `dmt recipes` lists them"
    return f"did you mean `{normpath(path.parent / close)}`?" if close else "check the name"
