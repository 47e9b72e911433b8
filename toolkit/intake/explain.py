"""pydantic's errors → one `Problem` per setting, in the user's words.

pydantic reports one error per member of a union and names its own types; here each
setting gets one problem that says what the schema as a whole accepts.
"""

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from toolkit.errors import Problem
from toolkit.intake.foreign import FOREIGN_VALUES, foreign, later_value
from toolkit.intake.layers import describe_node
from toolkit.recipe import yaml_nodes
from toolkit.recipe.describe import (
    Setting,
    accepts,
    allowed,
    choices,
    default_text,
    fields_of,
    kind_of,
    members,
    plain_text,
    settings,
)
from toolkit.recipe.schema import GPU_MAP, GPU_NAME, ONE_SOURCE, SOURCE_LIST, Recipe
from toolkit.recipe.section import Section
from toolkit.recipe.yaml_nodes import Location, Node, Scalar
from toolkit.removed import SETTINGS, VALUES
from toolkit.text.suggest import closest

MAX_PROBLEMS = 100
"""Most problems reported at once; a file with more is not a recipe."""

UNKNOWN_KEY = "an unknown key"

_YES_NO = {
    "yes": "true",
    "on": "true",
    "y": "true",
    "no": "false",
    "off": "false",
    "n": "false",
}
_REMOVE = "remove it; docs/recipe.md lists every setting"
_ELSEWHERE = 0.8
"""How similar a key must be to one of another section to be taken for its misspelling."""
_MOST_PLACES = 3
"""A key that more sections have (`name`) says nothing about which one was meant."""
_BOUNDS = (
    ("ge", operator.lt, "write {} or more"),
    ("gt", operator.le, "write more than {}"),
    ("le", operator.gt, "write {} or less"),
    ("lt", operator.ge, "write less than {}"),
)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def explain(errors: Sequence[ErrorDetails], root: yaml_nodes.Mapping) -> list[Problem]:
    """One problem per wrong setting, missing settings last.

    A missing setting is left out when an unknown key is explained as its misspelling.
    """
    by_key: dict[str, tuple[list[str | int], str]] = {}
    for error in errors:
        path = path_of(error["loc"])
        kind = error["type"]
        if kind == "missing" and path and isinstance(path[-1], int):
            path, kind = path[:-1], "too_short"
        by_key.setdefault(dotted(path), (path, kind))
    # A list is also reported as too short when one of its items is wrong.
    lists = {key[:end] for key in by_key for end, c in enumerate(key) if c == "["}
    problems, meant = (
        list[Problem](),
        {key for key, one in by_key.items() if one[1] != "missing"},
    )
    for key, (path, kind) in by_key.items():
        if kind == "extra_forbidden":
            problem, keys = _unknown(path, root, len(problems) < MAX_PROBLEMS)
            problems.append(problem)
            meant.update(keys)
        elif kind != "missing" and key not in lists:
            problems.append(_wrong_value(path, kind, root))
    for key, (path, kind) in by_key.items():
        if kind == "missing" and not any(is_inside(other, key) for other in meant):
            problems.append(_missing(path, key, root))
    return problems


def dotted(path: Sequence[str | int]) -> str:
    """`["data", "train", "files", 0]` → `data.train.files[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parts_of(key: str) -> list[str | int]:
    """The reverse of `dotted`."""
    parts = re.split(r"\.|(?=\[\d+\](?:[.\[]|$))", key)
    return [int(part[1:-1]) if part.startswith("[") else part for part in parts]


def setting_of(path: Sequence[str | int]) -> str:
    """`["data", "train", 0, "path"]` → `data.train.path`: its name in `settings()`."""
    return ".".join(part for part in path if isinstance(part, str))


def place_of(path: Sequence[str | int], root: yaml_nodes.Mapping) -> Location:
    """Where a setting is stated: its value, else the nearest section around it."""
    place = root.place
    for end in range(1, len(path) + 1):
        parent, node = node_at(path[: end - 1], root), node_at(path[:end], root)
        if node is None:
            break
        if (isinstance(node, Scalar) and node.text) or not isinstance(
            parent, yaml_nodes.Mapping
        ):
            place = node.place
        else:
            place = parent.entries[str(path[end - 1])].place
    return place


def place_of_key(path: Sequence[str | int], root: yaml_nodes.Mapping) -> Location:
    """Where the key of a stated setting stands."""
    parent = node_at(path[:-1], root)
    assert isinstance(parent, yaml_nodes.Mapping)
    return parent.entries[str(path[-1])].place


def node_at(path: Sequence[str | int], root: yaml_nodes.Mapping) -> Node | None:
    """The node at a path; None when the recipe does not state it."""
    node: Node = root
    for part in path:
        if isinstance(node, yaml_nodes.Mapping) and part in node.entries:
            node = node.entries[str(part)].node
        elif isinstance(node, yaml_nodes.Sequence) and isinstance(part, int):
            if part >= len(node.items):
                return None
            node = node.items[part]
        else:
            return None
    return node


def is_inside(key: str, section: str) -> bool:
    """Whether a setting is a section, or a part of it."""
    return key == section or key.startswith((f"{section}.", f"{section}["))


def path_of(loc: Sequence[str | int]) -> list[str | int]:
    """The recipe's own path in pydantic's location, without names of union members."""
    path: list[str | int] = []
    sections: Sequence[type[Section]] = (Recipe,)
    for part in loc:
        if isinstance(part, int):
            path.append(part)
        elif part in (GPU_NAME, GPU_MAP, ONE_SOURCE, SOURCE_LIST):
            continue
        elif len(sections) > 1:
            sections = [section for section in sections if kind_of(section) == part]
        elif sections:
            path.append(part)
            info = sections[0].model_fields.get(part)
            sections = Setting(part, info).sections if info else ()
        else:
            break  # a member of a union of plain values
    return path


def _wrong_value(path: list[str | int], error: str, root: yaml_nodes.Mapping) -> Problem:
    key = dotted(path)
    if error in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_kind(path, root)
    node = node_at(path, root)
    assert node is not None, f"pydantic reports {key}, which the recipe does not state"
    annotation, metadata, info = _expected(path)
    found = describe_node(node)
    if isinstance(node, yaml_nodes.Sequence) and error in ("too_short", "too_long"):
        found = f"a list of {len(node.items)}"
    fix = _fix(key, node, annotation, metadata, info)
    return Problem(key, found, allowed(annotation, metadata), fix, *place_of(path, root))


def _expected(path: Sequence[str | int]) -> tuple[Any, Sequence[Any], FieldInfo]:
    """What the setting (or the list's item) at `path` accepts."""
    info = settings()[setting_of(path)].info
    if not isinstance(path[-1], int):
        return info.annotation, info.metadata, info
    arguments = next(
        get_args(listed)
        for listed, _ in members(info.annotation)
        if get_origin(listed) is tuple
    )
    item = arguments[0] if arguments[-1] is Ellipsis else arguments[path[-1]]
    return item, (), info


def _wrong_kind(path: list[str | int], root: yaml_nodes.Mapping) -> Problem:
    kinds = [kind_of(section) for section in settings()[setting_of(path)].sections]
    node = node_at([*path, "kind"], root)
    found = describe_node(node) if node else "nothing"
    fix = _similar(_kind(path, root), kinds) or f"add `kind: {kinds[0]}`"
    place, accepted = place_of([*path, "kind"], root), f"one of {', '.join(kinds)}"
    return Problem(f"{dotted(path)}.kind", found, accepted, fix, *place)


def _missing(path: list[str | int], key: str, root: yaml_nodes.Mapping) -> Problem:
    info = settings()[setting_of(path)].info
    accepted = allowed(info.annotation, info.metadata)
    section = dotted(path[:-1])
    where = f"under `{section}`" if section else "at the top level"
    place = place_of(path[:-1], root)
    return Problem(key, "nothing", accepted, f"add `{path[-1]}:` {where}", *place)


def _unknown(
    path: list[str | int], root: yaml_nodes.Mapping, look_up: bool
) -> tuple[Problem, list[str]]:
    """An unknown key: another tool's name, a key of another section, or a misspelling; and the
    settings that may be meant.

    Only looked up for the problems that are shown: thousands would take a minute.
    """
    key, name, section = dotted(path), str(path[-1]), dotted(path[:-1])
    here = fields_of(setting_of(path[:-1]), _kind(path[:-1], root))
    where = f"`{section}`" if section else "the top level"
    place, accepted = place_of_key(path, root), f"in {where}: {', '.join(here)}"
    if instead := SETTINGS.get(setting_of(path)):
        return Problem(key, "a setting that was removed", accepted, instead, *place), []
    fix, meant = _what_was_meant(name, section, here) if look_up else (_REMOVE, [])
    return Problem(key, UNKNOWN_KEY, accepted, fix, *place), meant


def _what_was_meant(
    name: str, section: str, here: Mapping[str, FieldInfo]
) -> tuple[str, list[str]]:
    """The fix for an unknown key, and the settings that the user may have meant."""
    elsewhere = [path for path in settings() if path.rpartition(".")[2] == name]
    other = foreign(name) or foreign(f"{section}.{name}")
    around = settings().get(setting_of(parts_of(section)))
    sections = around.sections if around else ()

    def kinds(key: str) -> str:
        return " or ".join(kind_of(one) for one in sections if key in one.model_fields)

    if needed := kinds(name):
        return f"remove it, or set kind to {needed}", []
    # A name that some section has is at the wrong place, unless it is everywhere.
    if 0 < len(elsewhere) <= _MOST_PLACES:
        parents = [path.rpartition(".")[0] for path in elsewhere]
        if not any(parents):
            return f"`{name}` belongs at the top level", elsewhere
        named = " or ".join(f"`{parent}`" for parent in parents if parent)
        return f"`{name}` belongs under {named}", elsewhere
    if other is not None:
        return other.advice, [other.target] if other.target else []
    prefix = f"{section}." if section else ""
    if close := closest(name.lower(), here):
        return f"did you mean `{close}`?", [prefix + close]
    if close := closest(name.lower(), {key for one in sections for key in one.model_fields}):
        return f"did you mean `{close}`, with kind {kinds(close)}?", []
    names = [path.rpartition(".")[2] for path in settings()]
    if close := closest(name.lower(), names, _ELSEWHERE):
        paths = [path for path in settings() if path.rpartition(".")[2] == close]
        return f"did you mean `{paths[0]}`?", paths
    return _REMOVE, []


def _fix(
    key: str, node: Node, annotation: Any, metadata: Sequence[Any], info: FieldInfo
) -> str:
    """What to type instead of a value that does not fit."""
    if isinstance(node, Scalar):
        fix = _fix_scalar(key, node, annotation, metadata) or _completed(node, info.default)
    elif isinstance(node, yaml_nodes.Sequence):
        single = len(node.items) == 1 and not _takes_list(annotation)
        fix = f"without brackets: {describe_node(node.items[0])}" if single else ""
    else:
        fix = ""
    if fix:
        return fix
    if not (info.is_required() or info.default is None or isinstance(info.default, Section)):
        return f"remove it for the default, {default_text(info)}"
    return f"write {allowed(annotation, metadata)}"


def _fix_scalar(key: str, node: Scalar, annotation: Any, metadata: Sequence[Any]) -> str:
    if isinstance(node.value, str):
        return _fix_text(key, node, annotation)
    if _takes_list(annotation) and node.value is not None:
        return "" if _is_pair(annotation) else f"put it in brackets: [{node.text}]"
    if translated := _translated(key, node.text):
        return translated
    if isinstance(node.value, bool):
        word = "auto" if node.value else "none"
        return f"write {word}" if word in choices(annotation) else later_value(key, node.value)
    if isinstance(node.value, float) and accepts(annotation, int) and abs(node.value) < 1e18:
        if node.value.is_integer():
            return f"write {int(node.value)}"
        return f"write a whole number, e.g. {round(node.value)}"
    if isinstance(node.value, int | float):
        if accepts(annotation, str) and not choices(annotation):
            return f'put it in quotes: "{node.text}"'
        return _nearest(float(node.value), annotation, metadata)
    return ""


def _fix_text(key: str, node: Scalar, annotation: Any) -> str:
    text = str(node.value)
    wants_number = accepts(annotation, int) or accepts(annotation, float)
    if accepts(annotation, bool) and text.lower() in _YES_NO:
        return f"write {_YES_NO[text.lower()]}"
    value = _plain_value(text) if node.quoted else None
    fits = accepts(annotation, type(value)) or (wants_number and isinstance(value, int))
    if value is not None and fits:
        return f"remove the quotes: {text}"
    if wants_number and (number := _spelt_out(text)):
        return f"write {number}"
    if translated := _translated(key, text):
        return translated
    if _takes_list(annotation):
        return f"put it in brackets: [{describe_node(node)}]"
    if key == "name" and (slug := _NOT_IN_NAMES.sub("-", text).strip("-._")[:100]):
        return f"write {slug}"
    return _similar(text, choices(annotation))


def _translated(key: str, text: str) -> str:
    """What another tool's value, or one that was removed, is here; empty for any other."""
    if instead := VALUES.get(key, {}).get(text):
        return instead
    if value := FOREIGN_VALUES.get(key, {}).get(text.lower()):
        return f"write {value}"
    return later_value(key, text)


def _takes_list(annotation: Any) -> bool:
    return any(get_origin(member) is tuple for member, _ in members(annotation))


def _is_pair(annotation: Any) -> bool:
    lists = [get_args(one) for one, _ in members(annotation) if get_origin(one) is tuple]
    return bool(lists) and Ellipsis not in lists[0]


def _completed(node: Scalar, default: object) -> str:
    """One number where a list of several is wanted: the others as by default."""
    number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if not number or not isinstance(default, tuple) or len(default) < 2:
        return ""
    return f"write {len(default)} values, e.g. {plain_text((node.value, *default[1:]))}"


def _plain_value(text: str) -> object:
    """What the text would be without its quotes, unless that is text as well."""
    try:
        value = yaml_nodes.resolve_plain(text)
    except yaml_nodes.NumberError:
        return None
    return None if isinstance(value, str) else value


def _spelt_out(text: str) -> str:
    """`1_000`, `1,000` and `8k` as plain numbers; empty for anything else."""
    bare = text.replace("_", "").replace(",", "").strip().lower()[:30]
    factor = _SUFFIXES.get(bare[-1:], 1)
    digits = bare[:-1] if factor > 1 else bare
    number = _plain_value(digits) if digits else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        return ""
    product = number * factor
    return plain_text(int(product) if product == int(product) else product)


def _nearest(value: float, annotation: Any, metadata: Sequence[Any]) -> str:
    """For a number out of range: the bound that it misses."""
    for _, constraints in members(annotation, metadata):
        for bound in constraints:
            for name, misses, fix in _BOUNDS:
                limit = getattr(bound, name, None)
                if limit is not None and misses(value, limit):
                    return fix.format(limit)
    return ""


def _similar(value: object, words: Iterable[str]) -> str:
    close = closest(value.lower(), words) if isinstance(value, str) else ""
    return f"did you mean {close}?" if close else ""


def _kind(path: Sequence[str | int], root: yaml_nodes.Mapping) -> object:
    node = node_at([*path, "kind"], root)
    return node.value if isinstance(node, Scalar) else None
