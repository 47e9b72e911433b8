"""From a recipe file to its settings: reading, `extends`, `--set`, relative paths.

A file overrides the files it extends. Of these, a later one overrides an earlier one.
Command-line overrides win over all.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from os.path import normpath
from pathlib import Path
from typing import Any

from toolkit.errors import Problem, RecipeError
from toolkit.recipe.places import (
    RECIPES,
    SHIPPED,
    composed_names,
    composed_of,
    exists,
    find_recipe,
    located,
    recipes_in,
    shipped_recipes,
)
from toolkit.recipe.yaml_text import (
    MAX_BYTES,
    MAX_DEPTH,
    TOP,
    WHOLE_FILE,
    KeyPath,
    Location,
    Stated,
    dotted,
    parse,
)
from toolkit.system.untrusted import read_bytes
from toolkit.text.dotted import leaves
from toolkit.text.redact import MASK, looks_secret
from toolkit.text.suggest import closest

OVERRIDE_FILE = "--set"
"""Stands for the file in problems of command-line overrides."""

_TAGS = ("kind", "model_type")
"""Keys that decide the meaning of the other keys in their map."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Layers:
    """All settings and files that were read for one recipe."""

    merged: Stated
    """The whole recipe, without `extends`."""
    problems: tuple[Problem, ...]
    """Mistakes that did not stop reading."""
    files: tuple[str, ...]
    """File names as shown in problems, the recipe itself first, `--set` last."""


def read_layers(path: Path, overrides: Sequence[str]) -> Layers:
    """Read a recipe, the files that it extends, and the overrides. A name without a file is
    that of a shipped recipe.

    Raises RecipeError when a file cannot be read or is no YAML map.
    """
    path = find_recipe(path)
    reader = _Files([], [])
    reader.read(path, (), Problem(WHOLE_FILE, "", "a readable file", file=str(path)))
    # A file that two others extend is below both: its last place counts.
    layers = dict(reversed(reader.layers))
    files = (*reversed(layers), OVERRIDE_FILE)
    on_top, problems = read_overrides(overrides)
    merged = reduce(merge, [*layers.values(), on_top])
    return Layers(merged, (*reader.problems, *problems), files)


def read_overrides(overrides: Sequence[str]) -> tuple[Stated, list[Problem]]:
    """Read `KEY.PATH=VALUE` texts, a later one on top. Returns settings and mistakes."""
    problems: list[Problem] = []
    each = [_override(text, problems) for text in overrides]
    stated = reduce(merge, each, Stated({}, {}))
    problems += _secrets(stated)
    return replace(stated, data=located(stated.data, Path.cwd())), problems


def merge(below: Stated, above: Stated) -> Stated:
    """`above` on top of `below`: maps deeply, lists and values replaced.

    A map whose `kind` (or `model_type`) differs replaces the other whole, because the
    rest of its keys then mean something else.
    """
    return Stated(_merged(below.data, above.data), {**below.places, **above.places})


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if any(tag in below and tag in above and below[tag] != above[tag] for tag in _TAGS):
        return above
    shared = {key: _merged(below[key], one) for key, one in above.items() if key in below}
    return {**below, **above, **shared}


def places_of(path: Path, overrides: Sequence[str]) -> dict[str, Location]:
    """Where each setting of a recipe is stated, by dotted name. Raises RecipeError when a file
    cannot be read."""
    merged = read_layers(path, overrides).merged
    return {key: merged.place(tuple(key.split("."))) for key, _ in leaves(merged.data)}


def _secrets(stated: Stated) -> Iterator[Problem]:
    """Credentials anywhere in a file. The values themselves are never shown."""
    for path, place in stated.places.items():
        key, value = dotted(path), stated.at(path)
        if not isinstance(value, dict | list) and looks_secret(key, value):
            fix = "remove it and set the environment variable (HF_TOKEN, WANDB_API_KEY) instead"
            yield Problem(key, MASK, "no credentials in a recipe", fix, *place)


@dataclass(frozen=True)
class _Files:
    """The files of one recipe as they are read."""

    layers: list[tuple[str, Stated]]
    problems: list[Problem]

    def read(self, path: Path, chain: tuple[Path, ...], origin: Problem) -> None:
        """Append the settings of a file, then of the files that it extends, the last one first.

        `chain` holds the files that led to this one. If it cannot be read, the error blames
        `origin`.
        """
        if found := composed_of(path):
            key = f"tasks.{found[1]}"
            stated = self.composed(path, *found, origin)
        else:
            key, stated = "extends", self.parsed(path, origin)
        taken = {"extends"}
        if path.suffix == ".yml" and "tasks" in stated.data:
            self.problems.extend(self.wrong_tasks(path, stated, is_extended=bool(chain)))
            taken.add("tasks")  # recipes by themselves
        self.problems.extend(_secrets(stated))
        own = {name: value for name, value in stated.data.items() if name not in taken}
        above = replace(stated, data=located(own, path.parent))
        self.layers.append((normpath(path), above))
        if "extends" in stated.data:
            for parent, place in reversed(self.extended(stated, path, (*chain, path), key)):
                self.read(parent, (*chain, path), place)

    def composed(self, path: Path, size: Path, task: str, origin: Problem) -> Stated:
        """The recipe SIZE-TASK, composed as if it were a file: the base of the task, then the
        size, then what the size's file states under `tasks`. A later one takes precedence."""
        whole, inside = self.parsed(size, origin), ("tasks", task)
        if isinstance(whole.data.get("tasks"), dict | None) and not whole.states(inside):
            fix = _similar(path, origin)
            raise self.stop(origin, f"no file {normpath(path)}", "an existing file", fix)
        own, place = whole.at(inside), whole.place(inside)
        base = Path("base") / f"{task}.yml"
        beside = Path("..") / base
        shared = beside if exists(path.parent / beside) else RECIPES / base
        data = {"name": path.stem, **(own if isinstance(own, dict) else {})}
        inner = {key[2:]: at for key, at in whole.places.items() if key[:2] == inside}
        places = {(): place, ("name",): place, ("extends",): place, **inner}
        return Stated({**data, "extends": [str(shared), size.name]}, places)

    def parsed(self, path: Path, origin: Problem) -> Stated:
        """The settings that a file states, a map."""
        name = normpath(path)
        text = self.text(path, name, origin)
        try:
            stated, problems = parse(text, name)
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

    def text(self, path: Path, name: str, origin: Problem) -> str:
        data = b""
        try:
            data = read_bytes(path, MAX_BYTES)
            return data.decode("utf-8-sig")
        except FileNotFoundError:
            found, fix = f"no file {name}", _similar(path, origin)
            raise self.stop(origin, found, "an existing file", fix) from None
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            fix = "save the file as UTF-8 text" if b"\0" not in data else "is this a recipe?"
            here = Problem(WHOLE_FILE, "", "", file=name, line=line)
            raise self.stop(here, "bytes that are no UTF-8", "UTF-8 text", fix) from None
        except (OSError, ValueError) as error:
            is_folder = isinstance(error, IsADirectoryError)
            found = f"{name}: {getattr(error, 'strerror', None) or error}"
            allowed = f"a YAML file of at most {MAX_BYTES // 1024} KiB that you may read"
            fix = "name a recipe in it" if is_folder else "name a recipe"
            raise self.stop(origin, found, allowed, fix) from None

    def wrong_tasks(
        self, path: Path, stated: Stated, *, is_extended: bool
    ) -> Iterator[Problem]:
        """Refuse entries that are no tasks of a size. Stop at a size that is read alone: it is
        no run."""
        tasks = stated.data["tasks"]
        if isinstance(tasks, dict) and not is_extended:
            names = ", ".join(normpath(path.with_name(one)) for one in composed_names(path))
            fix = f"name one of {names}" if names else "name a recipe that extends it"
            at = Problem("tasks", "", "", "", *stated.place(("tasks",)))
            raise self.stop(at, "a size of a model, which is no run", "a recipe", fix)
        values: dict[KeyPath, Any] = {("tasks",): tasks}
        if isinstance(tasks, dict):
            values = {("tasks", name): value for name, value in tasks.items()}
        for key, value in values.items():
            if not isinstance(value, dict | None) or "extends" in (value or ()):
                allowed = "maps of settings by task, without `extends`"
                fix = "write `tasks: {NAME: {…}}`, and `extends` at the top of the size"
                place = stated.place(key)
                yield Problem(dotted(key), stated.text(key), allowed, fix, *place)

    def extended(
        self, stated: Stated, path: Path, chain: Sequence[Path], key: str
    ) -> list[tuple[Path, Problem]]:
        """The files named by `extends`. Each comes with the place of its name, whose setting is
        `key`."""
        named, parents = stated.data["extends"], []
        paths: list[KeyPath] = [("extends",)]
        if isinstance(named, list) and named:
            paths = [("extends", number) for number in range(len(named))]
        for here in paths:
            place = stated.places.get(here, stated.places[("extends",)])
            origin = Problem(key, "", "", "", *place)
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


def _override(text: str, problems: list[Problem]) -> Stated:
    """The settings of a `KEY.PATH=VALUE` text. Empty if it cannot be read."""
    key, equals, value = text.partition("=")
    key = key.strip()
    parts, nothing = tuple(key.split(".")), Stated({}, {})
    if not equals or not all(parts) or len(parts) > MAX_DEPTH:
        fix = "e.g. --set parallel.tensor=4"
        problems.append(Problem(OVERRIDE_FILE, text, "KEY.PATH=VALUE", fix, OVERRIDE_FILE))
        return nothing
    try:
        stated, wrong = parse(value, OVERRIDE_FILE)
    except RecipeError as error:
        stated, wrong = nothing, [*error.problems]
    problems.extend(replace(problem, key=key, line=0) for problem in wrong)
    if stated is nothing:
        return nothing
    data = stated.data
    for name in reversed(parts):
        data = {name: data}
    above = [parts[:end] for end in range(1, len(parts))]
    inside = [(*parts, *path) for path in stated.places]
    return Stated(data, dict.fromkeys([*above, *inside], Location(OVERRIDE_FILE, 0)))


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of symbolic links
        return path


def _similar(path: Path, origin: Problem) -> str:
    """The fix for a missing file that the command line or `extends` names."""
    extends = origin.key == "extends"
    if "=" in path.name and not extends:
        return f"write --set {path}"
    if not extends and _HUB_ID.fullmatch(str(path)) and path.suffix not in (".yaml", ".yml"):
        return f"for a model of the hub: dmt init {path} --cluster NODESxGPUSxNAME"
    if not path.parent.is_dir():
        return f"there is no folder {normpath(path.parent)}"
    sizes = path.parent.glob("*.yml") if path.suffix == ".yml" else ()
    names = [file.name for file in (*recipes_in(path.parent), *sizes)]
    if close := closest(path.name, names):
        return f"did you mean `{normpath(path.parent / close)}`?"
    shipped = shipped_recipes()
    if not (close := closest(path.name, shipped)):
        return "check the name"
    name = f"{SHIPPED}{shipped[close].relative_to(RECIPES).with_suffix('')}"
    known = f"`{name}`" if extends else f"the shipped recipe `{close}`"
    return f"did you mean {known}? `dmt recipes` lists them"
