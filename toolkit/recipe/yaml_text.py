"""YAML text → plain data, with the line of every key.

ruamel.yaml composes a tree without types, whose size and depth are bounded here, aliases
included. Plain scalars are read by the YAML 1.2 core schema. No constructor ever runs, so a tag
cannot create an object.
"""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from toolkit.errors import Problem, RecipeError

MAX_BYTES = 256 * 1024
"""Largest file that is read. ruamel's scanner needs more than linear time for some inputs."""
MAX_NODES = 20_000
"""Most nodes of a document, aliases counted as often as they are used."""
MAX_DEPTH = 32
"""Deepest nesting, aliases included."""
TOP = "(top level)"
"""Key of a mistake in the recipe's outermost map itself."""
WHOLE_FILE = "(file)"
"""Key of a mistake that is not about one setting."""

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_PYYAML_BOOLS = {"yes": True, "on": True, "no": False, "off": False}
_UNDERSCORED = re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?")
_OCTAL = re.compile(r"[-+]?0[0-7]+")
_INT = re.compile(r"[-+]?[0-9]{1,64}|0o[0-7]{1,64}|0x[0-9a-fA-F]{1,64}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_SAFE_UNQUOTED = re.compile(r"[A-Za-z_./][A-Za-z0-9_./ -]*[A-Za-z0-9_./-]|[A-Za-z]")
_YAML_1_1_WORDS = frozenset((*_PYYAML_BOOLS, "y", "n"))

_SYNTAX_FIXES = {
    "mapping values are not allowed here": "put a value that contains `: ` in quotes, "
    "and check the indentation",
    "found character '\\t' that cannot start any token": "indent with spaces, not tabs",
    "but found another document": "keep one document per file",
    "expected '<document start>', but found ('{',)": "give a recipe, which names a file of "
    "rows in `data.train.path`",
}

Value: TypeAlias = bool | int | float | str | None
KeyPath: TypeAlias = tuple[str | int, ...]
"""`("data", "train", 0, "path")`: names of keys and numbers of items."""


class Location(NamedTuple):
    """File name as shown to the user, 1-based line (0: none)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Stated:
    """The data of a document, or of several on top of each other."""

    data: Any
    """Dicts, lists and values."""
    places: Mapping[KeyPath, Location]
    """Where each key and item stands, () for the document."""

    def place(self, path: KeyPath) -> Location:
        """Where a setting is stated, or else the nearest section around it."""
        while path not in self.places or not self.states(path):
            path = path[:-1]
        return self.places[path]

    def states(self, path: KeyPath) -> bool:
        """True if there is a key or item at a path. The document is always there."""
        if not path:
            return True
        around, part = self.at(path[:-1]), path[-1]
        if isinstance(around, list):
            return isinstance(part, int) and part < len(around)
        return isinstance(around, dict) and part in around

    def at(self, path: KeyPath) -> Any:
        """The value at a path. None when it is not stated."""
        node = self.data
        for part in path:
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                return None
        return node

    def text(self, path: KeyPath) -> str:
        """What a path holds, for a problem: a value as YAML states it, or e.g. `a map`."""
        value = self.at(path)
        if isinstance(value, dict):
            return "a map"
        if isinstance(value, list):
            return "a list" if value else "an empty list"
        if isinstance(value, str):
            return value if is_plain(value) else f'"{value}"'
        return "nothing" if value is None else plain_text(value)


def plain_text(value: object) -> str:
    """A value as a recipe would state it on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(plain_text(item) for item in value)}]"
    return str(value)


def dotted(path: KeyPath) -> str:
    """`("data", "train", "files", 0)` → `data.train.files[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parts_of(key: str) -> KeyPath:
    """The reverse of `dotted`."""
    parts = re.split(r"\.|(?=\[\d+\](?:[.\[]|$))", key)
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def resolve_plain(text: str) -> Value:
    """Value of an unquoted scalar by the YAML 1.2 core schema. An integer of more than 64
    digits is a float, or a text if it is hexadecimal or octal."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", "").lower())
    return text


def is_plain(text: str) -> bool:
    """True if every YAML reader takes these letters, without quotes, for this text."""
    is_safe = _SAFE_UNQUOTED.fullmatch(text) and text.lower() not in _YAML_1_1_WORDS
    return bool(is_safe) and isinstance(resolve_plain(text), str)


def _in_pyyaml(text: str, value: Value) -> Value:
    """An unquoted scalar by YAML 1.1, where that differs: `on`, `500_000`, `0777`."""
    if _UNDERSCORED.fullmatch(text):
        return resolve_plain(text.replace("_", ""))
    if _OCTAL.fullmatch(text):
        return int(text, 8)
    return _PYYAML_BOOLS.get(text.lower(), value)


def parse(text: str, file: str, *, is_foreign: bool = False) -> tuple[Stated, list[Problem]]:
    """Read one YAML document.

    `file` is only shown in errors. `is_foreign`: of a tool that reads it by PyYAML, where
    `yes`, `no`, `on` and `off` are booleans. Returns what is stated and the mistakes that do
    not stop reading (tags, keys stated twice, keys that are not text).

    Raises RecipeError when the text is no YAML or exceeds a bound.
    """
    reader = _Reader(file, is_foreign)
    root = reader.compose(text)
    reader.places[()] = reader.place(root)
    data = reader.value(root, ()) if root is not None else None
    return Stated(data, reader.places), reader.problems


class _NoTypes(VersionedResolver):
    """Leaves the type of values without a tag open."""

    def resolve(self, *_: object) -> Tag:
        return Tag(suffix="")


@lru_cache(maxsize=64)
def _composed(text: str) -> Any:
    """The tree of ruamel's composer, which nobody changes: recipes share the files that they
    extend."""
    if "\t" in text:
        with suppress(ValueError, RecursionError):
            json.loads(text)
            text = text.replace("\t", " ")  # JSON may be indented by tabs, YAML may not
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _NoTypes
    yaml.composer.warn_double_anchors = False
    return yaml.compose(text)


@dataclass
class _Reader:
    file: str
    is_foreign: bool
    problems: list[Problem] = field(default_factory=list)
    places: dict[KeyPath, Location] = field(default_factory=dict)
    nodes: int = 0
    around: list[Any] = field(default_factory=list)
    """The collections that the present node is in."""

    def compose(self, text: str) -> Any:
        """The tree of ruamel's composer, its errors turned into ours."""
        line = 1
        try:
            return _composed(text)
        except RecursionError:
            raise self.too_much(f"nesting deeper than {MAX_DEPTH} levels", 1) from None
        except ReaderError as error:
            reason = f"the character {error.character!r}"
            line = text.count("\n", 0, error.position) + 1
        except MarkedYAMLError as error:
            reason = str(error.problem or error.context)
            if mark := error.problem_mark or error.context_mark:
                line = mark.line + 1
        except (YAMLError, ValueError, LookupError, AssertionError, AttributeError) as error:
            reason = type(error).__name__  # some malformed directives and escapes
        raise self.syntax(reason, line)

    def syntax(self, reason: str, line: int) -> RecipeError:
        fix = _SYNTAX_FIXES.get(reason, "fix the YAML at this line or just above it")
        found = reason.removeprefix("but ").removeprefix("found ")
        return self.stop(found, "valid YAML", fix, line)

    def too_much(self, found: str, line: int) -> RecipeError:
        return self.stop(found, "a file of settings", "shorten it", line)

    def stop(self, found: str, allowed: str, fix: str, line: int) -> RecipeError:
        problem = Problem(WHOLE_FILE, found, allowed, fix, self.file, line)
        return RecipeError([*self.problems, problem])

    def place(self, node: Any) -> Location:
        return Location(self.file, node.start_mark.line + 1 if node is not None else 1)

    def report(self, path: KeyPath, node: Any, found: str, allowed: str, fix: str) -> None:
        key = dotted(path) or TOP
        self.problems.append(Problem(key, found, allowed, fix, *self.place(node)))

    def value(self, node: Any, path: KeyPath) -> Any:
        """The data of one of ruamel's nodes, at a path of the document."""
        line = self.place(node).line
        self.nodes += 1
        if self.nodes > MAX_NODES:
            found = f"more than {MAX_NODES} values, aliases counted at each use"
            raise self.too_much(found, line)
        if len(self.around) > MAX_DEPTH:
            raise self.too_much(f"nesting deeper than {MAX_DEPTH} levels", line)
        if isinstance(node, ScalarNode):
            return self.scalar(node, path)
        if node in self.around:
            found = f"the alias `*{node.anchor}` inside the value that it stands for"
            raise self.syntax(found, line)
        self.around.append(node)
        is_map = isinstance(node, MappingNode)
        if node.tag.removeprefix(_TAG) not in ("", "map" if is_map else "seq"):
            self.bad_tag(node, path)
        built = self.mapping(node, path) if is_map else self.sequence(node, path)
        self.around.pop()
        return built

    def mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        merged: dict[str, Any] | None = None
        for key_node, value in node.value:
            if key_node.value == "<<" and key_node.style is None:
                if merged is not None:
                    found, fix = "a second merge key", "write one: `<<: [*first, *second]`"
                    self.report(path, key_node, found, "each key once", fix)
                merged = self.merged(value, path)
                continue
            name = self.key_name(key_node, path)
            here = (*path, name) if name else path
            if name and name in entries:
                line = self.places[here].line
                found = f"the key again, already stated on line {line}"
                self.report(here, key_node, found, "each key once", "remove one of the two")
            elif name:
                self.places[here] = self.place(key_node)
                entries[name] = self.value(value, here)
        return (merged or {}) | entries

    def merged(self, node: Any, path: KeyPath) -> dict[str, Any]:
        """The entries that a merge key brings, of one map or several. The first win."""
        entries: dict[str, Any] = {}
        for one in node.value if isinstance(node, SequenceNode) else (node,):
            places = dict(self.places)
            built = self.value(one, path)
            self.places |= places
            if not isinstance(built, dict):
                raise self.syntax("no map behind the merge key", self.place(node).line)
            entries = built | entries
        return entries

    def key_name(self, node: Any, path: KeyPath) -> str:
        """The key's text. Empty, with a problem reported, when it cannot be a key."""
        text = str(node.value) if isinstance(node, ScalarNode) else ""
        name = self.scalar(node, path) if text else ""
        if isinstance(name, str) and name:
            return name
        fix = f'put it in quotes: "{text}"' if text else "write a text before the colon"
        self.report(path, node, f"the key {text!r}" if text else "no text", "text keys", fix)
        return ""

    def sequence(self, node: Any, path: KeyPath) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            self.places[(*path, index)] = self.place(item)
            items.append(self.value(item, (*path, index)))
        return items

    def scalar(self, node: Any, path: KeyPath) -> Value:
        text, is_quoted = str(node.value), node.style is not None
        if _UNSTORABLE.search(text):  # JSON escapes an emoji as two surrogates
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if found := _UNSTORABLE.search(text):
            fix = "remove the character"
            self.report(path, node, f"the character {found[0]!r}", "text", fix)
            return ""
        value: Value = text if is_quoted else resolve_plain(text)
        if self.is_foreign and not is_quoted:
            value = _in_pyyaml(text, value)
        if isinstance(value, float) and not math.isfinite(value):
            self.report(path, node, text, "a finite number", "write another number")
        if node.tag:
            self.bad_tag(node, path)
        return value

    def bad_tag(self, node: Any, path: KeyPath) -> None:
        shown = node.tag.replace(_TAG, "!!")
        fix = "remove the tag: a recipe holds plain values only"
        self.report(path, node, f"the tag `{shown}`", "no tags", fix)
