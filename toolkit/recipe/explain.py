"""pydantic's errors → one `Problem` per setting, in the user's words.

pydantic reports one error per member of a union and names its own types; here each
setting gets one problem that says what the schema as a whole accepts.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from toolkit.errors import Problem
from toolkit.recipe.foreign import FOREIGN_VALUES, foreign, later_value
from toolkit.recipe.schema import Recipe
from toolkit.recipe.section import Section
from toolkit.recipe.words import Setting, members, plain_text, schema_of, settings
from toolkit.recipe.yaml_text import KeyPath, NumberError, Stated, dotted, resolve_plain
from toolkit.removed import SETTINGS, VALUES
from toolkit.text.dotted import is_within
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
_BOUNDS: tuple[tuple[str, Callable[[float, float], bool], str], ...] = (
    ("minimum", lambda value, bound: value < bound, "write {} or more"),
    ("exclusiveMinimum", lambda value, bound: value <= bound, "write more than {}"),
    ("maximum", lambda value, bound: value > bound, "write {} or less"),
    ("exclusiveMaximum", lambda value, bound: value >= bound, "write less than {}"),
)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def explain(
    error: ValidationError, stated: Stated, section: type[Section] = Recipe
) -> list[Problem]:
    """One problem per wrong setting, missing settings last.

    `section` is the schema that has refused `stated`: a recipe's, or a cluster's.
    """
    return _Explanation(stated, section).problems(error)


@dataclass(frozen=True)
class _Explanation:
    stated: Stated
    section: type[Section]

    @property
    def settings(self) -> dict[str, Setting]:
        return settings(self.section)

    def problems(self, error: ValidationError) -> list[Problem]:
        """A missing setting is left out when an unknown key is explained as its misspelling."""
        kinds = self.kinds(error)
        # A list is also reported as too short when one of its items is wrong.
        around = {path[:end] for path in kinds for end in range(len(path))}
        lists = {path for path in around if isinstance(self.stated.at(path), list)}
        meant = {dotted(path) for path, kind in kinds.items() if kind != "missing"}
        problems: list[Problem] = []
        for path, kind in kinds.items():
            if kind == "extra_forbidden":
                problem, keys = self.unknown(path, len(problems) < MAX_PROBLEMS)
                problems.append(problem)
                meant.update(keys)
            elif kind.startswith("union_tag"):
                problems.append(self.wrong_kind(path))
            elif kind != "missing" and path not in lists:
                problems.append(self.wrong_value(path, kind))
        for path, kind in kinds.items():
            if kind == "missing" and not any(is_within(key, [dotted(path)]) for key in meant):
                problems.append(self.missing(path))
        return problems

    def kinds(self, error: ValidationError) -> dict[KeyPath, str]:
        """The first of pydantic's errors about each setting, by its path."""
        kinds: dict[KeyPath, str] = {}
        for one in error.errors(include_url=False, include_context=False, include_input=False):
            path, kind = self.path_of(one["loc"]), one["type"]
            if one["loc"][-1] == "[key]":
                path, kind = (*path, one["loc"][-2]), "extra_forbidden"
            if kind == "missing" and path and isinstance(path[-1], int):
                path, kind = path[:-1], "too_short"
            kinds.setdefault(path, kind)
        return kinds

    def path_of(self, loc: KeyPath) -> KeyPath:
        """The user's own path in pydantic's location, without names of union members."""
        path: list[str | int] = []
        is_kind = False
        for part in loc:
            if isinstance(part, int):
                path.append(part)
            elif is_kind and not part.startswith("("):
                is_kind = False
            elif not part.startswith("("):
                above = self.settings.get(setting_of(tuple(path)))
                if above is not None and not above.sections:
                    break  # a member of a union of plain values
                path.append(part)
                setting = self.settings.get(setting_of(tuple(path)))
                is_kind = setting is not None and len(setting.sections) > 1
        return tuple(path)

    def problem(self, path: KeyPath, found: str, accepted: str, fix: str) -> Problem:
        return Problem(dotted(path), found, accepted, fix, *self.stated.place(path))

    def wrong_value(self, path: KeyPath, error: str) -> Problem:
        setting, value = self.settings[setting_of(path)], self.stated.at(path)
        if isinstance(path[-1], int):
            setting = setting.item(path[-1])
        found = self.stated.text(path)
        if isinstance(value, list) and error in ("too_short", "too_long"):
            found = f"a list of {len(value)}"
        usual = setting.allowed.removesuffix(", or null")  # who states a value wants one
        fix = _fix(path, setting, self.stated) or f"write {usual}"
        return self.problem(path, found, setting.allowed, fix)

    def wrong_kind(self, path: KeyPath) -> Problem:
        kinds, here = self.settings[setting_of(path)].kinds, (*path, "kind")
        allowed = f"one of {', '.join(kinds)}"
        add = "add" if self.stated.at(here) is None else "write"
        fix = _similar(self.stated.at(here), [*kinds]) or f"{add} `kind: {next(iter(kinds))}`"
        return self.problem(here, self.stated.text(here), allowed, fix)

    def missing(self, path: KeyPath) -> Problem:
        section = dotted(path[:-1])
        where = f"under `{section}`" if section else "at the top level"
        accepted = self.settings[setting_of(path)].allowed
        return self.problem(path, "nothing", accepted, f"add `{path[-1]}:` {where}")

    def unknown(self, path: KeyPath, look_up: bool) -> tuple[Problem, list[str]]:
        """An unknown key: another tool's name, a key of another section, or a misspelling; and
        the settings that may be meant.

        Only looked up for the problems that are shown: thousands would take a minute.
        """
        section = dotted(path[:-1])
        here = self.fields(setting_of(path[:-1]), self.stated.at((*path[:-1], "kind")))
        accepted = f"in {f'`{section}`' if section else 'the top level'}: {', '.join(here)}"
        if self.section is Recipe and (instead := SETTINGS.get(setting_of(path))):
            return self.problem(path, "a setting that was removed", accepted, instead), []
        fix, meant = _REMOVE, list[str]()
        if look_up:
            fix, meant = self.what_was_meant(str(path[-1]), section, here)
        return self.problem(path, UNKNOWN_KEY, accepted, fix), meant

    def fields(self, path: str, kind: object) -> list[str]:
        """Keys of the section at a dotted path, of which `kind` may choose one form; of a map
        with fixed keys, those."""
        if not path:
            return [*schema_of(self.section)["properties"]]
        if (setting := self.settings.get(path)) is None:
            return []
        maps = [one.get("propertyNames", {}) for one in members(setting.schema)]
        chosen = setting.kinds.get(str(kind))
        forms = [one["properties"] for one in ([chosen] if chosen else setting.sections)]
        forms += [one.get("enum", ()) for one in maps]
        return [*dict.fromkeys(key for keys in forms for key in keys)]

    def what_was_meant(self, name: str, section: str, here: list[str]) -> tuple[str, list[str]]:
        """The fix for an unknown key, and the settings that the user may have meant."""
        around = self.settings.get(re.sub(r"\[\d+\]", "", section))
        forms = around.kinds if around else {}

        def kinds(key: str) -> str:
            return " or ".join(kind for kind, one in forms.items() if key in one["properties"])

        if needed := kinds(name):
            return f"remove it, or set kind to {needed}", []
        # A name that some section has is at the wrong place, unless it is everywhere.
        elsewhere = [path for path in self.settings if path.rpartition(".")[2] == name]
        if 0 < len(elsewhere) <= _MOST_PLACES:
            parents = [f"`{above}`" for path in elsewhere if (above := path.rpartition(".")[0])]
            where = f"under {' or '.join(parents)}" if parents else "at the top level"
            return f"`{name}` belongs {where}", elsewhere
        other = foreign(name) or foreign(f"{section}.{name}")
        if other and self.section is Recipe:
            return other.advice, [other.target] if other.target else []
        if close := closest(name.lower(), here):
            return f"did you mean `{close}`?", [f"{section}.{close}" if section else close]
        inside = {key for one in forms.values() for key in one["properties"]}
        if close := closest(name.lower(), inside):
            return f"did you mean `{close}`, with kind {kinds(close)}?", []
        names = [path.rpartition(".")[2] for path in self.settings]
        if close := closest(name.lower(), names, _ELSEWHERE):
            paths = [path for path in self.settings if path.rpartition(".")[2] == close]
            return f"did you mean `{paths[0]}`?", paths
        return _REMOVE if self.section is Recipe else "remove it", []


def setting_of(path: KeyPath) -> str:
    """`("data", "train", 0, "path")` → `data.train.path`: its name in `settings()`."""
    return ".".join(part for part in path if isinstance(part, str))


def _fix(path: KeyPath, setting: Setting, stated: Stated) -> str:
    """The text to type instead of a value that does not fit; empty where none is known."""
    value, takes_list = stated.at(path), setting.takes("array")
    if isinstance(value, list):
        takes_one = setting.takes("string", "integer", "number", "boolean")
        single = len(value) == 1 and takes_one and not takes_list
        return f"without brackets: {stated.text((*path, 0))}" if single else ""
    if isinstance(value, dict) or value is None:
        return ""
    if isinstance(value, str):
        return _fix_text(path, value, setting, stated)
    key, text = setting_of(path), stated.unquoted(path)
    if takes_list:
        return _in_brackets(value, text, setting)
    if translated := _translated(key, text):
        return translated
    if isinstance(value, bool):
        word = "auto" if value else "none"
        return f"write {word}" if word in setting.choices else later_value(key, value)
    if isinstance(value, float) and setting.takes("integer") and abs(value) < 1e18:
        if value.is_integer():
            return f"write {int(value)}"
        return f"write a whole number, e.g. {round(value)}"
    if setting.takes("string") and not setting.choices:
        return f'put it in quotes: "{text}"'
    return _nearest(value, setting)


def _fix_text(path: KeyPath, text: str, setting: Setting, stated: Stated) -> str:
    key, choices = setting_of(path), setting.choices
    numbers = setting.takes("integer", "number")
    if setting.takes("boolean") and text.lower() in _YES_NO:
        return f"write {_YES_NO[text.lower()]}"
    value = _plain_value(text) if stated.is_quoted(path) else None
    is_boolean = isinstance(value, bool) and setting.takes("boolean")
    if is_boolean or (numbers and isinstance(value, int | float)):
        return f"remove the quotes: {text}"
    if numbers and (number := _spelt_out(text)):
        return f"write {number}"
    if translated := _translated(key, text):
        return translated
    if setting.takes("array"):
        return f"put it in brackets: [{stated.text(path)}]"
    if key == "name" and (slug := _NOT_IN_NAMES.sub("-", text).strip("-._")[:100]):
        return f"write {slug}"
    return _similar(text, choices)


def _translated(key: str, text: str) -> str:
    """The fix of another tool's value, or a removed one; empty for any other."""
    if instead := VALUES.get(key, {}).get(text):
        return instead
    if value := FOREIGN_VALUES.get(key, {}).get(text.lower()):
        return f"write {value}"
    return later_value(key, text)


def _in_brackets(value: Any, text: str, setting: Setting) -> str:
    """One value where a list is wanted; of a pair, the others as by default."""
    default = setting.schema.get("default") or []
    if not any("prefixItems" in one for one in members(setting.schema)):
        return f"put it in brackets: [{text}]"
    if isinstance(value, bool) or len(default) < 2:
        return ""
    return f"write {len(default)} values, e.g. {plain_text([value, *default[1:]])}"


def _plain_value(text: str) -> object:
    """The value of a text without its quotes; None if that is text as well."""
    try:
        value = resolve_plain(text)
    except NumberError:
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


def _nearest(value: float, setting: Setting) -> str:
    """For a number out of range: the bound that it misses."""
    for one in members(setting.schema):
        for name, misses, fix in _BOUNDS:
            if name in one and misses(value, one[name]):
                return fix.format(one[name])
    return ""


def _similar(value: object, choices: list[str]) -> str:
    close = closest(value.lower(), choices) if isinstance(value, str) else ""
    return f"did you mean {close}?" if close else ""
