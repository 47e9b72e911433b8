"""YAML text → a small tree of nodes that know their file and line.

ruamel.yaml composes its own tree, without types; this module bounds its size and depth,
aliases included, and reads plain scalars by the YAML 1.2 core schema. No constructor
ever runs, so a tag cannot create an object.
"""

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from toolkit.errors import Problem, RecipeError

MAX_BYTES = 256 * 1024
"""Largest file; ruamel's scanner needs more than linear time for some inputs."""
MAX_NODES = 20_000
"""Most nodes of a document, aliases counted as often as they are used."""
MAX_DEPTH = 32
"""Deepest nesting, aliases included."""
MAX_NUMBER_LENGTH = 64
"""Longest number, in characters."""

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
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")

_CORE_TYPES = {"int": int, "float": float, "bool": bool, "null": type(None)}
_SYNTAX_FIXES = {
    "mapping values are not allowed here": "put a value that contains `: ` in quotes, "
    "and check the indentation",
    "found character '\\t' that cannot start any token": "indent with spaces, not tabs",
    "but found another document": "keep one document per file",
}

Value: TypeAlias = bool | int | float | str | None


class Location(NamedTuple):
    """Where a node stands: file name as shown to the user, 1-based line (0: none)."""

    file: str
    line: int


@dataclass(frozen=True)
class Scalar:
    """One value, with its text as the user wrote it."""

    place: Location
    value: Value
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Sequence:
    """A list."""

    place: Location
    items: tuple["Node", ...]


@dataclass(frozen=True)
class Mapping:
    """A map with text keys; each entry keeps the place of its key."""

    place: Location
    entries: dict[str, "YamlEntry"]


@dataclass(frozen=True)
class YamlEntry:
    """A key's place and its value."""

    place: Location
    node: "Node"


Node: TypeAlias = Scalar | Sequence | Mapping


class NumberError(ValueError):
    """A number that is too long, or not finite."""


def to_data(node: Node) -> Any:
    """The node as plain dicts, lists and values."""
    if isinstance(node, Mapping):
        return {key: to_data(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, Sequence):
        return [to_data(item) for item in node.items]
    return node.value


def resolve_plain(text: str) -> Value:
    """Value of an unquoted scalar by the YAML 1.2 core schema.

    Raises NumberError for numbers that are not finite or longer than
    `MAX_NUMBER_LENGTH`.
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _NOT_FINITE.fullmatch(text):
        raise NumberError("a finite number")
    is_int = _INT.fullmatch(text)
    if not is_int and not _FLOAT.fullmatch(text):
        return text
    if len(text) > MAX_NUMBER_LENGTH:
        raise NumberError(f"a number of at most {MAX_NUMBER_LENGTH} characters")
    if is_int:
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    number = float(text)
    if not math.isfinite(number):
        raise NumberError("a finite number")
    return number


def _in_pyyaml(text: str, value: Value) -> Value:
    """An unquoted scalar by YAML 1.1, where that differs: `on`, `500_000`, `0777`."""
    if _UNDERSCORED.fullmatch(text):
        return resolve_plain(text.replace("_", ""))
    if _OCTAL.fullmatch(text):
        return int(text, 8)
    return _PYYAML_BOOLS.get(text.lower(), value)


def parse(
    text: str, file: str, *, has_lines: bool = True, is_foreign: bool = False
) -> tuple[Node, list[Problem]]:
    """Read one YAML document.

    `file` is only shown in errors; `has_lines=False` leaves line numbers out (for
    command-line values); `is_foreign`: of a tool that reads it by PyYAML, where merge keys
    count and `yes`, `no`, `on` and `off` are booleans. Returns the tree and the mistakes that
    do not stop reading (tags, keys stated twice, keys that are not text).

    Raises RecipeError when the text is no YAML or exceeds a bound.
    """
    builder = _Builder(file, has_lines, is_foreign)
    return builder.document(text), builder.problems


class _NoTypes(VersionedResolver):
    """Leaves the type of values without a tag open."""

    def resolve(self, *_: object) -> Tag:
        return Tag(suffix="")


@lru_cache(maxsize=64)
def _composed(text: str) -> Any:
    """The tree of ruamel's composer, which nobody changes: recipes share the files that they
    extend."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _NoTypes
    yaml.composer.warn_double_anchors = False
    return yaml.compose(text)


@dataclass
class _Builder:
    file: str
    has_lines: bool
    is_foreign: bool
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0
    around: list[Any] = field(default_factory=list)
    """The collections that the present node is in."""

    def document(self, text: str) -> Node:
        if len(text) > MAX_BYTES:
            raise self.fatal("a longer text", f"at most {MAX_BYTES} characters")
        root = self.compose(text)
        if root is None:
            return Scalar(Location(self.file, int(self.has_lines)), None, "")
        return self.node(root, "")

    def compose(self, text: str) -> Any:
        """The tree of ruamel's composer, its errors turned into ours."""
        try:
            return _composed(text)
        except RecursionError:
            raise self.fatal("deeper nesting", f"at most {MAX_DEPTH} levels") from None
        except ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise self.syntax(f"the character {error.character!r}", line) from None
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = error.problem or error.context or "no YAML"
            raise self.syntax(str(reason), mark.line + 1 if mark else 1) from None
        except (YAMLError, ValueError, LookupError, AssertionError, AttributeError) as error:
            # ruamel reports some malformed directives and escapes this way.
            raise self.syntax(type(error).__name__, 1) from None

    def syntax(self, reason: str, line: int) -> RecipeError:
        fix = _SYNTAX_FIXES.get(reason, "fix the YAML at this line or just above it")
        found = reason.removeprefix("but ").removeprefix("found ")
        return self.stop(found, "valid YAML", fix, line)

    def fatal(self, found: str, allowed: str, node: Any = None) -> RecipeError:
        line = node.start_mark.line + 1 if node is not None else 1
        return self.stop(found, allowed, "shorten the recipe", line)

    def stop(self, found: str, allowed: str, fix: str, line: int) -> RecipeError:
        line = line if self.has_lines else 0
        problem = Problem(WHOLE_FILE, found, allowed, fix, self.file, line)
        return RecipeError([*self.problems, problem])

    def place(self, node: Any) -> Location:
        return Location(self.file, node.start_mark.line + 1 if self.has_lines else 0)

    def report(self, key: str, place: Location, found: str, allowed: str, fix: str) -> None:
        self.problems.append(Problem(key, found, allowed, fix, place.file, place.line))

    def node(self, node: Any, key: str) -> Node:
        """Our node for ruamel's; `key` is its dotted path."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            found = "more values, aliases counted at each use"
            raise self.fatal(found, f"at most {MAX_NODES}", node)
        if len(self.around) > MAX_DEPTH:
            raise self.fatal("deeper nesting", f"at most {MAX_DEPTH} levels", node)
        if isinstance(node, ScalarNode):
            return self.scalar(node, key)
        if node in self.around:
            found = f"the alias `*{node.anchor}` inside the value that it stands for"
            raise self.syntax(found, node.start_mark.line + 1)
        self.around.append(node)
        is_map = isinstance(node, MappingNode)
        self.check_tag(node, key, "map" if is_map else "seq")
        built = self.mapping(node, key) if is_map else self.sequence(node, key)
        self.around.pop()
        return built

    def mapping(self, node: Any, key: str) -> Mapping:
        entries: dict[str, YamlEntry] = {}
        merged: dict[str, YamlEntry] = {}
        for name_node, value in node.value:
            if self.is_foreign and name_node.value == "<<" and name_node.style is None:
                merged = self.merged(value, key) | merged
                continue
            place = self.place(name_node)
            name = self.key_name(self.node(name_node, key), key, place)
            path = f"{key}.{name}" if key else name
            entry = YamlEntry(place, self.node(value, path))
            if name in entries:
                first = entries[name].place.line
                before = f"already stated on line {first}" if first else "stated twice"
                found = f"the key again, {before}"
                self.report(path, place, found, "each key once", "remove one of the two")
            elif name:
                entries[name] = entry
        return Mapping(self.place(node), merged | entries)

    def merged(self, node: Any, key: str) -> dict[str, YamlEntry]:
        """What a merge key brings: a map's entries, or those of several; the first win."""
        built = self.node(node, key)
        maps = built.items if isinstance(built, Sequence) else (built,)
        entries: dict[str, YamlEntry] = {}
        for one in maps:
            if not isinstance(one, Mapping):
                raise self.syntax("no map behind the merge key", node.start_mark.line + 1)
            entries = one.entries | entries
        return entries

    def key_name(self, node: Node, parent: str, place: Location) -> str:
        """The key's text; empty, with a problem reported, when it cannot be a key."""
        if not isinstance(node, Scalar):
            fix = "write a text key before the colon"
            self.report(parent or TOP, place, "a list or map as a key", "text keys", fix)
            return ""
        if node.text == "<<" and not node.quoted:
            fix = "write the settings out, or use `extends:`"
            path = f"{parent}.<<" if parent else "<<"
            self.report(path, place, "a merge key", "text keys", fix)
            return ""
        if not isinstance(node.value, str) or not node.value:
            fix = f'put it in quotes: "{node.text}"' if node.text else "write a key first"
            self.report(parent or TOP, place, f"the key {node.text!r}", "text keys", fix)
            return ""
        return node.value

    def sequence(self, node: Any, key: str) -> Sequence:
        items = (self.node(item, f"{key}[{index}]") for index, item in enumerate(node.value))
        return Sequence(self.place(node), tuple(items))

    def scalar(self, node: Any, key: str) -> Scalar:
        place, text = self.place(node), str(node.value)
        quoted = node.style is not None
        if found := _UNSTORABLE.search(text):
            fix = "remove the character"
            self.report(key or TOP, place, f"the character {found[0]!r}", "text", fix)
            return Scalar(place, "", "", quoted)
        try:
            value: Value = text if quoted else resolve_plain(text)
            if self.is_foreign and not quoted:
                value = _in_pyyaml(text, value)
            return Scalar(place, self.cast(node, key, value, text), text, quoted)
        except NumberError as error:
            self.report(key or TOP, place, text, str(error), "write another number")
            return Scalar(place, None, text, quoted)

    def cast(self, node: Any, key: str, value: Value, text: str) -> Value:
        """Apply an explicit core tag (`!!str 5`); report any other tag."""
        tag = node.tag.removeprefix(_TAG)
        if not tag:
            return value
        if tag == "str":
            return text
        read = resolve_plain(text)
        if tag == "float" and type(read) is int:
            return float(read)
        if type(read) is _CORE_TYPES.get(tag):
            return read
        self.bad_tag(node, key)
        return value

    def check_tag(self, node: Any, key: str, allowed: str) -> None:
        if node.tag.removeprefix(_TAG) not in ("", allowed):
            self.bad_tag(node, key)

    def bad_tag(self, node: Any, key: str) -> None:
        shown = node.tag.replace(_TAG, "!!")
        fix = "remove the tag: a recipe holds plain values only"
        self.report(key or TOP, self.place(node), f"the tag `{shown}`", "no tags", fix)
