"""From a recipe file to what it states: reading, `extends`, `--set`, relative paths.

Each file is a layer on top of those that it extends, of which a later one is on top of
an earlier one, with the overrides of the command line on top of all.
"""

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
from toolkit.text.suggest import closest

OVERRIDE_FILE = "--set"
"""Stands for the file in problems of command-line overrides."""
MAX_FILES = 16
"""Most files that a recipe may be made of."""

_TAGS = ("kind", "model_type")
"""Keys that say what the other keys of their map mean."""


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
        each = (_override(text, reader.problems) for text in overrides)
        on_top = reduce(merge, each, Stated({}, {(): Location(OVERRIDE_FILE, 0)}, {}))
        layers[OVERRIDE_FILE] = replace(on_top, data=located(on_top.data, Path.cwd()))
    merged = reduce(merge, layers.values())
    return Layers(merged, tuple(layers.values()), tuple(reader.problems), files)


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


def places_of(path: Path, overrides: Sequence[str]) -> dict[str, Location]:
    """Where each setting of a recipe is stated, by dotted name. Raises RecipeError when a file
    cannot be read."""
    merged = read_layers(path, overrides).merged
    return {key: merged.place(tuple(key.split("."))) for key, _ in leaves(merged.data)}


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
        if found := composed_of(path):
            self.compose(path, *found, chain, origin)
        else:
            self.add(path, self.parsed(path, normpath(path), origin), chain, origin)

    def add(self, path: Path, stated: Stated, chain: tuple[Path, ...], origin: Problem) -> None:
        """Append what was read of a file, then the files that it extends."""
        data, taken = stated.data, {"extends"}
        if path.suffix == ".yml" and "tasks" in data:
            self.problems.extend(self.wrong_tasks(path, stated, is_extended=bool(chain)))
            taken.add("tasks")  # recipes by themselves
        own = {key: value for key, value in data.items() if key not in taken}
        self.push(path, replace(stated, data=own), origin)
        if "extends" in data:
            for parent, place in reversed(self.extended(stated, path, (*chain, path))):
                self.read(parent, (*chain, path), place)

    def push(self, path: Path, stated: Stated, origin: Problem) -> None:
        """Append what a file states itself."""
        if len(self.layers) == MAX_FILES:
            allowed = f"at most {MAX_FILES}"
            raise self.stop(origin, "more files", allowed, "extend fewer files")
        own = replace(stated, data=located(stated.data, path.parent))
        self.layers.append((normpath(path), own))

    def compose(
        self, path: Path, size: Path, task: str, chain: tuple[Path, ...], origin: Problem
    ) -> None:
        """Append the recipe SIZE-TASK, which is no file: what the size's file states under
        `tasks`, then the size and what all recipes of the task share."""
        whole, inside = self.parsed(size, normpath(size), origin), ("tasks", task)
        if isinstance(whole.data.get("tasks"), dict | None) and not whole.states(inside):
            fix = _similar(path)
            raise self.stop(origin, f"no file {normpath(path)}", "an existing file", fix)
        own = whole.inside(inside)
        stated = own.data if isinstance(own.data, dict) else {}
        data = {"name": path.stem, **stated}
        data.pop("extends", None)  # reported with the size
        places = {("name",): own.places[()], **own.places}
        written = {("name",): path.stem, **own.written}
        self.push(path, Stated(data, places, written), origin)
        self.add(size, whole, (*chain, path), origin)
        base = Path("base") / f"{task}.yml"
        beside = path.parent / ".." / base
        place = Problem(dotted(inside), "", "", "", *own.places[()])
        self.read(beside if exists(beside) else RECIPES / base, (*chain, path), place)

    def parsed(self, path: Path, name: str, origin: Problem) -> Stated:
        """What a file states, a map."""
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
            found = f"no file {name}"
            raise self.stop(origin, found, "an existing file", _similar(path)) from None
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            fix = "save the file as UTF-8 text" if b"\0" not in data else "is this a recipe?"
            here = Problem(WHOLE_FILE, "", "", file=name, line=line)
            raise self.stop(here, "bytes that are no UTF-8", "UTF-8 text", fix) from None
        except OSError as error:
            is_folder = isinstance(error, IsADirectoryError)
            fix = "name a recipe in it" if is_folder else "check its name, its kind and rights"
            found = f"{name}: {error.strerror}"
            raise self.stop(origin, found, "a YAML file that you may read", fix) from None
        except ValueError as error:
            allowed = f"a YAML file of at most {MAX_BYTES // 1024} KiB"
            fix = "name a recipe: this file is too large to be one"
            raise self.stop(origin, f"{name}: {error}", allowed, fix) from None

    def wrong_tasks(
        self, path: Path, stated: Stated, *, is_extended: bool
    ) -> Iterator[Problem]:
        """What cannot be a task of a size. A size is no run: it stops as the recipe itself."""
        tasks = stated.data["tasks"]
        if not isinstance(tasks, dict | None):
            fix = "write `tasks: {NAME: {…}}`, or remove it"
            yield _wrong(stated, ("tasks",), "a map of tasks", fix)
            return
        if tasks is not None and not is_extended:
            names = ", ".join(normpath(path.with_name(one)) for one in composed_names(path))
            fix = f"name one of {names}" if names else "name a recipe that extends it"
            at = _wrong(stated, ("tasks",), "a recipe", fix)
            raise self.stop(at, "a size of a model, which is no run", at.allowed, fix)
        for task, value in (tasks or {}).items():
            if not isinstance(value, dict | None):
                fix = f"write `{task}: {{…}}`, or remove it"
                yield _wrong(stated, ("tasks", task), "a map of settings", fix)
            elif value and "extends" in value:
                fix = "write what it brings here, or `extends` at the top of the size"
                yield _wrong(stated, ("tasks", task, "extends"), "settings alone", fix)

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


def _wrong(stated: Stated, path: KeyPath, allowed: str, fix: str) -> Problem:
    return Problem(dotted(path), stated.text(path), allowed, fix, *stated.place(path))


def _override(text: str, problems: list[Problem]) -> Stated:
    """What a `KEY.PATH=VALUE` text states: nothing if it cannot be read."""
    key, equals, value = text.partition("=")
    key = key.strip()
    parts, nothing = tuple(key.split(".")), Stated({}, {}, {})
    if not equals or not all(parts) or len(parts) > MAX_DEPTH:
        fix = "e.g. --set parallel.tensor=4"
        problems.append(Problem(OVERRIDE_FILE, text, "KEY.PATH=VALUE", fix, OVERRIDE_FILE))
        return nothing
    if key == "extends":
        fix = "write it into the recipe file"
        problems.append(Problem("extends", text, "settings", fix, OVERRIDE_FILE))
        return nothing
    try:
        stated, wrong = parse(value, OVERRIDE_FILE)
    except RecipeError as error:
        stated, wrong = nothing, [*error.problems]
    problems.extend(replace(problem, key=key, line=0) for problem in wrong)
    return nothing if stated is nothing else stated.under(parts, OVERRIDE_FILE)


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
