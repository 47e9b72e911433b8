"""YAML text → a small tree of nodes that know their file and line.

ruamel.yaml only splits the text into events; this module builds the tree itself and
reads plain scalars by the YAML 1.2 core schema. No constructor ever runs, so a tag
cannot create an object, and size, depth and aliases are bounded while reading.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

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
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")

_CORE_TYPES = {"int": int, "float": float, "bool": bool, "null": type(None)}
_SYNTAX_FIXES = {
    "mapping values are not allowed here": "put a value that contains `: ` in quotes, "
    "and check the indentation",
    "found character '\\t' that cannot start any token": "indent with spaces, not tabs",
}

Value: TypeAlias = bool | int | float | str | None


class Place(NamedTuple):
    """Where a node stands: file name as shown to the user, 1-based line (0: none)."""

    file: str
    line: int


@dataclass(frozen=True)
class Scalar:
    """One value, with its text as the user wrote it."""

    place: Place
    value: Value
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Sequence:
    """A list."""

    place: Place
    items: tuple["Node", ...]


@dataclass(frozen=True)
class Mapping:
    """A map with text keys; each entry keeps the place of its key."""

    place: Place
    entries: dict[str, "Entry"]


@dataclass(frozen=True)
class Entry:
    """A key's place and its value."""

    place: Place
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


def parse(text: str, file: str, *, has_lines: bool = True) -> tuple[Node, list[Problem]]:
    """Read one YAML document.

    `file` is only shown in errors; `has_lines=False` leaves line numbers out (for
    command-line values). Returns the tree and the mistakes that do not stop reading
    (tags, keys stated twice, keys that are not text).

    Raises RecipeError when the text is no YAML or exceeds a bound.
    """
    builder = _Builder(file, has_lines)
    return builder.document(text), builder.problems


class _Anchored(NamedTuple):
    """A finished node that aliases may repeat."""

    node: Node
    nodes: int
    """How many nodes it has, aliases inside counted in full."""
    height: int


@dataclass
class _Builder:
    file: str
    has_lines: bool
    problems: list[Problem] = field(default_factory=list)
    anchors: dict[str, _Anchored] = field(default_factory=dict)
    nodes: int = 0

    def document(self, text: str) -> Node:
        if len(text) > MAX_BYTES:
            raise self.fatal("a longer text", f"at most {MAX_BYTES} characters")
        events = self.events(text)
        if not any(isinstance(event, DocumentStartEvent) for event in events):
            return Scalar(Place(self.file, int(self.has_lines)), None, "")
        root = self.node(next(events), events, "", 0)
        for event in events:
            if isinstance(event, DocumentStartEvent):
                fix = "keep one document per file"
                raise self.fatal("a second document (`---`)", "one document", event, fix)
        return root

    def events(self, text: str) -> Iterator[Event]:
        """Events of ruamel's parser, its errors turned into ours."""
        try:
            yield from YAML(typ="safe", pure=True).parse(text)
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
        return self.stop(reason.removeprefix("found "), "valid YAML", fix, line)

    def fatal(
        self,
        found: str,
        allowed: str,
        event: Event | None = None,
        fix: str = "shorten the recipe",
    ) -> RecipeError:
        line = event.start_mark.line + 1 if event is not None else 1
        return self.stop(found, allowed, fix, line)

    def stop(self, found: str, allowed: str, fix: str, line: int) -> RecipeError:
        line = line if self.has_lines else 0
        problem = Problem(WHOLE_FILE, found, allowed, fix, self.file, line)
        return RecipeError([*self.problems, problem])

    def place(self, event: Event) -> Place:
        return Place(self.file, event.start_mark.line + 1 if self.has_lines else 0)

    def report(self, key: str, place: Place, found: str, allowed: str, fix: str) -> None:
        self.problems.append(Problem(key, found, allowed, fix, place.file, place.line))

    def node(self, event: Event, events: Iterator[Event], key: str, depth: int) -> Node:
        """The node that begins with `event`; `key` is its dotted path."""
        before = self.nodes
        self.count(1, event)
        if depth > MAX_DEPTH:
            raise self.fatal("deeper nesting", f"at most {MAX_DEPTH} levels", event)
        if isinstance(event, AliasEvent):
            return self.alias(event, depth)
        node: Node
        if isinstance(event, MappingStartEvent):
            node = self.mapping(event, events, key, depth)
        elif isinstance(event, SequenceStartEvent):
            node = self.sequence(event, events, key, depth)
        else:
            assert isinstance(event, ScalarEvent)
            node = self.scalar(event, key)
        assert isinstance(event, NodeEvent)
        if event.anchor is not None:
            self.anchors[event.anchor] = _Anchored(node, self.nodes - before, _height(node))
        return node

    def count(self, nodes: int, event: Event) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise self.fatal(
                "more values, aliases counted at each use", f"at most {MAX_NODES}", event
            )

    def alias(self, event: AliasEvent, depth: int) -> Node:
        anchored = self.anchors.get(event.anchor)
        if anchored is None:
            raise self.syntax(
                f"the alias `*{event.anchor}` without an earlier, finished `&{event.anchor}`",
                event.start_mark.line + 1,
            )
        self.count(anchored.nodes, event)
        if depth + anchored.height > MAX_DEPTH:
            raise self.fatal("deeper nesting", f"at most {MAX_DEPTH} levels", event)
        return anchored.node

    def mapping(
        self, start: MappingStartEvent, events: Iterator[Event], key: str, depth: int
    ) -> Mapping:
        self.check_tag(start, key, "map")
        entries: dict[str, Entry] = {}
        for event in events:
            if not isinstance(event, NodeEvent):
                break
            place = self.place(event)
            name_node = self.node(event, events, key, depth + 1)
            name = self.key_name(name_node, key, place)
            path = f"{key}.{name}" if key else name
            node = self.node(next(events), events, path, depth + 1)
            if name in entries:
                first = entries[name].place.line
                before = f"already stated on line {first}" if first else "stated twice"
                found = f"the key again, {before}"
                self.report(path, place, found, "each key once", "remove one of the two")
            elif name:
                entries[name] = Entry(place, node)
        return Mapping(self.place(start), entries)

    def key_name(self, node: Node, parent: str, place: Place) -> str:
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

    def sequence(
        self, start: SequenceStartEvent, events: Iterator[Event], key: str, depth: int
    ) -> Sequence:
        self.check_tag(start, key, "seq")
        items: list[Node] = []
        for event in events:
            if isinstance(event, SequenceEndEvent):
                break
            items.append(self.node(event, events, f"{key}[{len(items)}]", depth + 1))
        return Sequence(self.place(start), tuple(items))

    def scalar(self, event: ScalarEvent, key: str) -> Scalar:
        place, text = self.place(event), str(event.value)
        quoted = event.style is not None
        if found := _UNSTORABLE.search(text):
            fix = "remove the character"
            self.report(key or TOP, place, f"the character {found[0]!r}", "text", fix)
            return Scalar(place, "", "", quoted)
        tag = _tag(event)
        try:
            value: Value = text if quoted or tag == "!" else resolve_plain(text)
            return Scalar(place, self.cast(event, key, value, text), text, quoted)
        except NumberError as error:
            self.report(key or TOP, place, text, str(error), "write another number")
            return Scalar(place, None, text, quoted)

    def cast(self, event: ScalarEvent, key: str, value: Value, text: str) -> Value:
        """Apply an explicit core tag (`!!str 5`); report any other tag."""
        tag = _tag(event).removeprefix(_TAG)
        if tag in ("", "!"):
            return value
        if tag == "str":
            return text
        read = resolve_plain(text)
        if tag == "float" and type(read) is int:
            return float(read)
        if type(read) is _CORE_TYPES.get(tag):
            return read
        self.bad_tag(event, key)
        return value

    def check_tag(self, event: CollectionStartEvent, key: str, allowed: str) -> None:
        if _tag(event).removeprefix(_TAG) not in ("", "!", allowed):
            self.bad_tag(event, key)

    def bad_tag(self, event: NodeEvent, key: str) -> None:
        shown = _tag(event).replace(_TAG, "!!")
        fix = "remove the tag: a recipe holds plain values only"
        self.report(key or TOP, self.place(event), f"the tag `{shown}`", "no tags", fix)


def _tag(event: Any) -> str:
    return str(event.tag or "")


def _height(node: Node) -> int:
    if isinstance(node, Scalar):
        return 0
    children: Iterable[Node] = (
        node.items
        if isinstance(node, Sequence)
        else (entry.node for entry in node.entries.values())
    )
    return 1 + max(map(_height, children), default=0)
