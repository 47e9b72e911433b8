"""pydantic's errors → one `Problem` per setting, in the user's words.

pydantic reports one error per member of a union and names its own types. Here each
setting gets one problem that says what the schema as a whole accepts.
"""

import math
import re
from dataclasses import dataclass

from pydantic import ValidationError

from toolkit.errors import Problem
from toolkit.recipe.foreign import foreign, value_fix
from toolkit.recipe.schema import Recipe
from toolkit.recipe.section import Section, legal_name
from toolkit.recipe.words import GUARD, Setting, members, schema_of, settings
from toolkit.recipe.yaml_text import (
    KeyPath,
    Stated,
    dotted,
    plain_text,
    resolve_plain,
)
from toolkit.removed import removed
from toolkit.text.dotted import is_within
from toolkit.text.suggest import closest

_YES_NO = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_REMOVE = "remove it; docs/recipe.md lists every setting"
_ELSEWHERE = 0.8
"""How similar a key must be to one of another section to be taken for its misspelling."""
_MOST_PLACES = 3
"""A key that more sections have (`name`) says nothing about which one was meant."""
_SPELT_OUT = re.compile(r"(\d[\d_,]{,20}(?:\.\d{,20})?) ?([kmbt]?)", re.IGNORECASE)
"""`1_000`, `1,000` and `8k`."""
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


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
                problem, keys = self.unknown(path)
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
        for one in error.errors(include_url=False, include_input=False):
            loc, kind = one["loc"], one["type"]
            path = self.path_of(loc)
            if kind == "missing":
                path, kind = (
                    (path, "too_short")
                    if isinstance(loc[-1], int)
                    else ((*path, loc[-1]), kind)
                )
            if loc[-1] == "[key]" or setting_of(path) not in self.settings:
                kind = "extra_forbidden"
            kinds.setdefault(path, kind)
        return kinds

    def path_of(self, loc: KeyPath) -> KeyPath:
        """The part of pydantic's location that the user states: no names of union members."""
        path: KeyPath = ()
        for part in loc:
            if self.stated.states((*path, part)):
                path = (*path, part)
        return path

    def problem(self, path: KeyPath, found: str, accepted: str, fix: str) -> Problem:
        return Problem(dotted(path), found, accepted, fix, *self.stated.place(path))

    def wrong_value(self, path: KeyPath, error: str) -> Problem:
        setting, value = self.settings[setting_of(path)], self.stated.at(path)
        if isinstance(path[-1], int):
            setting = setting.item(path[-1])
        found = self.stated.text(path)
        if value and isinstance(value, list) and error in ("too_short", "too_long"):
            found = f"a list of {len(value)}"
        fix = _fix(path, setting, self.stated)
        usual = setting.allowed.removesuffix(", or null")  # who states a value wants one
        return self.problem(path, found, setting.allowed, fix or f"write {usual}")

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

    def unknown(self, path: KeyPath) -> tuple[Problem, list[str]]:
        """An unknown key, and the settings that may be meant."""
        section = dotted(path[:-1])
        here = self.fields(setting_of(path[:-1]), self.stated.at((*path[:-1], "kind")))
        accepted = f"in {f'`{section}`' if section else 'the top level'}: {', '.join(here)}"
        if self.section is Recipe and (instead := removed().settings.get(setting_of(path))):
            return self.problem(path, "a setting that was removed", accepted, instead), []
        fix, meant = self.what_was_meant(str(path[-1]), section, here)
        return self.problem(path, "an unknown key", accepted, fix), meant

    def fields(self, path: str, kind: object) -> list[str]:
        """Keys of the section at a dotted path, of which `kind` may choose one form. For a map
        with fixed keys, these."""
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
        """The fix for an unknown key, and the settings that the user may have meant: one of
        another kind or section, another tool's name, or a misspelling."""
        around = self.settings.get(re.sub(r"\[\d+\]", "", section))
        forms = around.kinds.items() if around else ()
        if kinds := [kind for kind, one in forms if name in one["properties"]]:
            return f"remove it, or set kind to {' or '.join(kinds)}", []
        names = {path: path.rpartition(".")[2] for path in self.settings}
        # A name that some section has is at the wrong place, unless it is everywhere.
        elsewhere = [path for path, last in names.items() if last == name]
        if 0 < len(elsewhere) <= _MOST_PLACES:
            parents = [f"`{above}`" for path in elsewhere if (above := path.rpartition(".")[0])]
            where = f"under {' or '.join(parents)}" if parents else "at the top level"
            return f"`{name}` belongs {where}", elsewhere
        other = foreign(name) or foreign(f"{section}.{name}")
        if other and self.section is Recipe:
            return other.advice, [other.target] if other.target else []
        if close := closest(name.lower(), here):
            return f"did you mean `{close}`?", [f"{section}.{close}".lstrip(".")]
        if close := closest(name.lower(), names.values(), _ELSEWHERE):
            paths = [path for path, last in names.items() if last == close]
            return f"did you mean `{paths[0]}`?", paths
        return _REMOVE if self.section is Recipe else "remove it", []


def setting_of(path: KeyPath) -> str:
    """`("data", "train", 0, "path")` → `data.train.path`: its name in `settings()`."""
    return ".".join(part for part in path if isinstance(part, str))


def _fix(path: KeyPath, setting: Setting, stated: Stated) -> str:
    """The text to type instead of a value that does not fit. Empty where none is known."""
    key, value = setting_of(path), stated.at(path)
    if value is None or isinstance(value, list):
        return ""
    text = "a map" if isinstance(value, dict) else plain_text(value)
    if isinstance(value, str) and (fix := _fix_text(key, value, setting)):
        return fix
    if translated := value_fix(key, text):
        return translated
    if isinstance(value, dict):
        return ""
    if setting.takes("array") and not any(
        "prefixItems" in one for one in members(setting.schema)
    ):
        return f"put it in brackets: [{stated.text(path)}]"
    if isinstance(value, bool):
        word = "auto" if value else "none"
        return f"write {word}" if word in setting.choices else ""
    if isinstance(value, float) and setting.takes("integer") and abs(value) < GUARD:
        return f"write {round(value)}"
    if isinstance(value, int) and setting.takes("integer") and value >= GUARD:
        return "write a smaller number"
    if setting.takes("string") and not setting.choices and not isinstance(value, str):
        return f'put it in quotes: "{text}"'
    return _similar(value, setting.choices)


def _fix_text(key: str, text: str, setting: Setting) -> str:
    """The boolean, number or name that a text is meant to be. Empty for any other."""
    value, numbers = resolve_plain(text), setting.takes("integer", "number")
    if setting.takes("boolean") and text.lower() in _YES_NO:
        return f"write {_YES_NO[text.lower()]}"
    if (
        setting.takes("boolean")
        if isinstance(value, bool)
        else numbers and isinstance(value, int | float) and math.isfinite(value)
    ):
        return f"remove the quotes: {text}"
    if numbers and (found := _SPELT_OUT.fullmatch(text)):
        digits, suffix = found.groups()
        number = float(re.sub("[_,]", "", digits)) * _SUFFIXES[suffix.lower()]
        return f"write {plain_text(int(number) if number.is_integer() else number)}"
    slug = legal_name(text) if key == "name" else ""
    return f"write {slug}" if slug else ""


def _similar(value: object, choices: list[str]) -> str:
    close = closest(value.lower(), choices) if isinstance(value, str) else ""
    return f"did you mean {close}?" if close else ""
