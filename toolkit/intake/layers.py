"""From a recipe file to one merged tree: reading, `extends`, `--set`, relative paths.

Each file is a layer on top of those that it extends, of which a later one is on top of
an earlier one, with the overrides of the command line on top of all. Every node still
knows the file and line that state it.
"""

import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path

from toolkit.errors import Problem, RecipeError
from toolkit.recipe import yaml_nodes
from toolkit.recipe.places import SHIPPED, find_recipe, is_remote, shipped_recipes
from toolkit.recipe.yaml_nodes import (
    TOP,
    WHOLE_FILE,
    Location,
    Mapping,
    Node,
    Scalar,
    YamlEntry,
)
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

    root: Mapping
    """The merged recipe, without `extends`."""
    trees: tuple[Mapping, ...]
    """Each file's own tree and the overrides', the recipe itself first."""
    problems: tuple[Problem, ...]
    """Mistakes that did not stop reading."""
    files: tuple[str, ...]
    """File names as shown in problems, the recipe itself first, `--set` last."""


def read_layers(path: Path, overrides: Sequence[str]) -> Layers:
    """Read a recipe, the files that it extends, and the overrides; a name without a file is
    that of a shipped recipe.

    Raises RecipeError when a file cannot be read or is no YAML map.
    """
    problems: list[Problem] = []
    read: list[tuple[str, Mapping]] = []
    path = find_recipe(path)
    origin = Problem(WHOLE_FILE, "", "a readable file", file=str(path))
    _read_file(path, (), origin, read, problems)
    # From the lowest layer to the highest; a file that two others extend is below both.
    layers = dict(reversed(read))
    root, *above = layers.values()
    for tree in above:
        root = merge(root, tree)
    trees, files = [*reversed(layers.values())], [*reversed(layers), OVERRIDE_FILE]
    if overrides:
        layer = _absolute_paths(_overrides(overrides, problems), Path.cwd())
        root = merge(root, layer)
        trees.append(layer)
    return Layers(root, tuple(trees), tuple(problems), tuple(files))


def merge(base: Mapping, over: Mapping) -> Mapping:
    """`over` on top of `base`: maps deeply, lists and values replaced.

    A map whose `kind` (or `model_type`) differs replaces the other whole, because the
    rest of its keys then mean something else.
    """
    for tag in _TAGS:
        old, new = base.entries.get(tag), over.entries.get(tag)
        if old and new and yaml_nodes.to_data(old.node) != yaml_nodes.to_data(new.node):
            return over
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        below = entries.get(key)
        if below and isinstance(below.node, Mapping) and isinstance(entry.node, Mapping):
            entries[key] = YamlEntry(entry.place, merge(below.node, entry.node))
        else:
            entries[key] = entry
    return Mapping(over.place, entries)


def layer_of(key: str, stated: YamlEntry) -> Mapping:
    """A tree with one setting, by its dotted key, at the place of its entry."""
    root = Mapping(stated.place, {})
    _put(root, key.split("."), stated.node)
    return root


def stated_in(path: Path, overrides: Sequence[str]) -> dict[str, str]:
    """Dotted name of every setting that a recipe states → the file, or `--set`, that states
    it; the recipe's own settings first, then those of the files that it extends.

    Raises RecipeError when a file cannot be read.
    """
    layers = read_layers(path, overrides)
    found = dict(_places(layers.root))
    own = (layers.files[0], OVERRIDE_FILE)
    return dict(sorted(found.items(), key=lambda one: one[1] not in own))


def _places(node: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, entry in node.entries.items():
        if isinstance(entry.node, Mapping) and entry.node.entries:
            yield from _places(entry.node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry.place.file


def _read_file(
    path: Path,
    chain: tuple[Path, ...],
    origin: Problem,
    read: list[tuple[str, Mapping]],
    problems: list[Problem],
) -> None:
    """Append a file's name and tree to `read`, then those that it extends, the last one first.

    `chain`: the files that led to this one. `origin` is the place to blame when it cannot be
    read.
    """
    name = normpath(path) if chain else str(path)
    text = _read_text(path, name, origin, problems)
    try:
        node, found = yaml_nodes.parse(text, name)
    except RecipeError as error:
        raise RecipeError([*problems, *error.problems]) from None
    problems.extend(found)
    if not isinstance(node, Mapping):
        empty = isinstance(node, Scalar) and node.value is None
        stated = "an empty file" if empty else describe_node(node)
        fix = (
            "copy a recipe from recipes/ and change it" if empty else "write `key: value` lines"
        )
        at = max(node.place.line, 1)
        wrong = Problem(TOP, stated, "a map of settings", fix, name, at)
        raise RecipeError([*problems, wrong])
    own = {key: value for key, value in node.entries.items() if key != "extends"}
    read.append((name, _absolute_paths(Mapping(node.place, own), path.parent)))
    if entry := node.entries.get("extends"):
        for parent, origin in reversed(_extended(entry, path, (*chain, path), problems)):
            if len(read) == MAX_FILES:
                allowed = f"at most {MAX_FILES}"
                raise _stop(problems, origin, "more files", allowed, "extend fewer files")
            _read_file(parent, (*chain, path), origin, read, problems)


def _read_text(path: Path, name: str, origin: Problem, problems: list[Problem]) -> str:
    def stop(found: str, allowed: str, fix: str) -> RecipeError:
        return _stop(problems, origin, found, allowed, fix)

    try:
        if not path.exists():
            raise stop(f"no file {name}", "an existing file", _similar_file(path))
        if not path.is_file():
            raise stop(f"{name}, which is no regular file", "a YAML file", "name a file")
        with path.open("rb") as file:
            data = file.read(yaml_nodes.MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise stop(f"{name}: {reason}", "a readable file", "check name and rights") from None
    if len(data) > yaml_nodes.MAX_BYTES:
        limit = f"at most {yaml_nodes.MAX_BYTES // 1024} KiB"
        found = f"{name} of {path.stat().st_size / 1024:,.0f} KiB"
        raise stop(found, limit, "name a recipe: this file is too large to be one")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        fix = "save the file as UTF-8 text" if b"\0" not in data else "is this a recipe?"
        at = Problem(WHOLE_FILE, "bytes that are no UTF-8", "UTF-8 text", fix, name, line)
        raise RecipeError([*problems, at]) from None


def _extended(
    entry: YamlEntry, path: Path, chain: Sequence[Path], problems: list[Problem]
) -> list[tuple[Path, Problem]]:
    """The files named by `extends`, each with the place that names it.

    Raises RecipeError when they cannot be followed.
    """
    stated = entry.node
    parents = []
    for node in stated.items if isinstance(stated, yaml_nodes.Sequence) else [stated]:
        origin = Problem("extends", "", "", file=node.place.file, line=node.place.line)
        value = node.value if isinstance(node, Scalar) else None
        if not isinstance(value, str) or not value:
            found, fix = describe_node(node), "extends: ../base/pretrain.yml"
            raise _stop(problems, origin, found, "a file name, or a list of them", fix)
        parent = find_recipe(Path(value)) if value.startswith(SHIPPED) else path.parent / value
        if _real(parent) in map(_real, chain):
            circle = " → ".join(normpath(file) for file in [*chain, parent])
            found, fix = f"a cycle: {circle}", "break the cycle"
            raise _stop(problems, origin, found, "a chain that ends", fix)
        parents.append((parent, origin))
    return parents


def _stop(
    problems: list[Problem], origin: Problem, found: str, allowed: str, fix: str
) -> RecipeError:
    at = Problem(origin.key, found, allowed, fix, origin.file, origin.line)
    return RecipeError([*problems, at])


def describe_node(node: Node) -> str:
    """What a node holds, as the user wrote it."""
    if isinstance(node, Mapping):
        return "a map"
    if isinstance(node, yaml_nodes.Sequence):
        return "a list"
    if node.value is None:
        return "nothing" if not node.text else node.text
    return f'"{node.text}"' if node.quoted else node.text


def _overrides(overrides: Sequence[str], problems: list[Problem]) -> Mapping:
    """One tree of all `KEY.PATH=VALUE` texts; later ones win."""
    root = Mapping(Location(OVERRIDE_FILE, 0), {})
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) > yaml_nodes.MAX_DEPTH:
            allowed, fix = "KEY.PATH=VALUE", "e.g. --set parallel.tensor=4"
            problems.append(Problem(OVERRIDE_FILE, text, allowed, fix, OVERRIDE_FILE))
            continue
        if parts == ["extends"]:
            fix = "write it into the recipe file"
            problems.append(Problem("extends", text, "settings", fix, OVERRIDE_FILE))
            continue
        try:
            node, found = yaml_nodes.parse(value, OVERRIDE_FILE, has_lines=False)
            _put(root, parts, node)
        except RecipeError as error:
            found = list(error.problems)
        problems.extend(
            Problem(key, problem.found, problem.allowed, problem.fix, OVERRIDE_FILE)
            for problem in found
        )
    return root


def _put(root: Mapping, parts: Sequence[str], node: Node) -> None:
    for part in parts[:-1]:
        entry = root.entries.get(part)
        if entry is None or not isinstance(entry.node, Mapping):
            entry = YamlEntry(root.place, Mapping(root.place, {}))
            root.entries[part] = entry
        assert isinstance(entry.node, Mapping)
        root = entry.node
    root.entries[parts[-1]] = YamlEntry(root.place, node)


def _absolute_paths(tree: Mapping, folder: Path, prefix: str = "") -> Mapping:
    """The tree with every setting that names a file or folder made absolute."""
    entries = {}
    for key, entry in tree.entries.items():
        path = f"{prefix}{key}"
        node = entry.node
        if isinstance(node, Mapping):
            node = _absolute_paths(node, folder, f"{path}.")
        elif isinstance(node, yaml_nodes.Sequence) and path not in _PATHS:
            items = (
                _absolute_paths(item, folder, f"{path}.") if isinstance(item, Mapping) else item
                for item in node.items
            )
            node = yaml_nodes.Sequence(node.place, tuple(items))
        elif resolve := _PATHS.get(path):
            node = _absolute(node, folder, resolve)
        entries[key] = YamlEntry(entry.place, node)
    return Mapping(tree.place, entries)


def _absolute(node: Node, folder: Path, resolve: Callable[[str, Path], bool]) -> Node:
    if isinstance(node, yaml_nodes.Sequence):
        items = tuple(_absolute(item, folder, resolve) for item in node.items)
        return yaml_nodes.Sequence(node.place, items)
    if not isinstance(node, Scalar) or not isinstance(node.value, str) or not node.value:
        return node
    if not resolve(node.value, folder):
        return node
    if resolve in (_is_glob, _is_local_data) and not _exists(folder / node.value):
        folder = Path(glob.escape(str(folder.absolute())))  # its own name is no glob
    return Scalar(node.place, _join(folder, node.value), node.text, node.quoted)


def _join(folder: Path, value: str) -> str:
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
    "adapter.folder": _is_file_name,
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


def _similar_file(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())[:1000]
    except OSError:
        return f"there is no folder {normpath(path.parent)}"
    close = closest(path.name, names)
    if shipped := closest(path.name, shipped_recipes()) if not close else "":
        return f"did you mean the shipped recipe `{shipped}`? `dmt recipes` lists them"
    return f"did you mean `{normpath(path.parent / close)}`?" if close else "check the name"
