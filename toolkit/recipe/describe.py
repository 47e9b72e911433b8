"""The schema in words: what a setting accepts, its dotted path, its default.

Used by the error texts (`load.py`) and the generated documentation (`docs.py`), so
that both always say the same thing.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from toolkit.recipe.schema import Recipe
from toolkit.recipe.section import Section, Wording

_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}
_GUARD = 2**32
"""Upper bounds above this only guard against nonsense; documentation leaves them out."""


@dataclass(frozen=True)
class Setting:
    """One field of the schema, at its place in the recipe."""

    path: str
    """Dotted path, e.g. `parallel.zero.stage`."""
    info: FieldInfo
    """pydantic's description of the field."""

    @property
    def allowed(self) -> str:
        """What it accepts, in words."""
        return allowed(self.info.annotation, self.info.metadata)

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """The section classes that its value or its items may be: none for plain values."""
        return tuple(dict.fromkeys(_sections(self.info.annotation)))


def _sections(annotation: Any) -> Iterator[type[Section]]:
    for member, _ in members(annotation):
        if get_origin(member) is tuple:
            yield from _sections(get_args(member)[0])
        elif isinstance(member, type) and issubclass(member, Section):
            yield member


def members(annotation: Any, metadata: Any = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The alternatives of a (possibly annotated) union, each with its constraints."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from members(inner, (*metadata, *_flat(more)))
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from members(member, metadata)
    else:
        yield annotation, tuple(metadata)


def accepts(annotation: Any, kind: type) -> bool:
    """May the value be of the plain type `kind` (a literal's type counts too)?"""
    for member, _ in members(annotation):
        if member is kind:
            return True
        if get_origin(member) is Literal and any(type(v) is kind for v in get_args(member)):
            return True
    return False


def choices(annotation: Any) -> list[str]:
    """The words that the value may be, e.g. `auto` or `cosine`."""
    return [
        value
        for member, _ in members(annotation)
        if get_origin(member) is Literal
        for value in get_args(member)
        if isinstance(value, str)
    ]


def allowed(annotation: Any, metadata: Any = ()) -> str:
    """What an annotation accepts: "an integer ≥ 1, or auto"."""
    tags = [kind for member, _ in members(annotation) if (kind := kind_of(member))]
    texts = [f"a map with `kind` one of {', '.join(tags)}"] if len(tags) > 1 else []
    for member, constraints in members(annotation, metadata):
        if not (len(tags) > 1 and kind_of(member)):
            texts.append(_member(member, constraints))
    return ", or ".join(texts)


def default_text(info: FieldInfo) -> str:
    """The default as YAML would show it; "required" when there is none."""
    if info.is_required():
        return "required"
    if isinstance(info.default, Section):
        return "see below"
    return plain_text(info.default)


def plain_text(value: object) -> str:
    """A value as a recipe would state it on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(plain_text(item) for item in value)}]"
    return str(value)


@cache
def settings(section: type[Section] = Recipe, prefix: str = "") -> dict[str, Setting]:
    """Every setting below `section` by dotted path, sections before their content."""
    found: dict[str, Setting] = {}
    for name, info in section.model_fields.items():
        setting = Setting(f"{prefix}{name}", info)
        found[setting.path] = setting
        for child in setting.sections:
            found.update(settings(child, f"{setting.path}."))
    return found


def fields_of(path: str, kind: object = None) -> dict[str, FieldInfo]:
    """Fields of the section at a dotted path ("" is the recipe itself).

    For a union of sections, those of the member that `kind` names, else of all.
    """
    if not path:
        return dict(Recipe.model_fields)
    setting = settings().get(path)
    sections = setting.sections if setting else ()
    chosen = [section for section in sections if kind_of(section) == kind] or sections
    return {name: info for section in chosen for name, info in section.model_fields.items()}


def _flat(metadata: list[Any]) -> Iterator[Any]:
    """Constraints, with those inside a pydantic FieldInfo unpacked."""
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def kind_of(annotation: Any) -> str:
    """The tag of a section in a discriminated union, else empty."""
    if not (isinstance(annotation, type) and issubclass(annotation, Section)):
        return ""
    info = annotation.model_fields.get("kind")
    return str(get_args(info.annotation)[0]) if info else ""


def _member(annotation: Any, metadata: tuple[Any, ...]) -> str:
    for item in metadata:
        if isinstance(item, Wording):
            return item.text
    if annotation is type(None):
        return "null"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        words = [plain_text(value) for value in arguments]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin is tuple:
        return _list_text(arguments)
    if origin is dict or annotation is dict:
        return "a map"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"a map of {', '.join(annotation.model_fields)}"
    return _NAMES[annotation] + _range_text(metadata)


def _list_text(arguments: tuple[Any, ...]) -> str:
    count = "a list of" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
    (item, constraints), *others = members(arguments[0])
    if others:
        return f"{count} such maps"
    if item not in _PLURALS:
        return f"{count} maps of {', '.join(item.model_fields)}"
    return f"{count} {_PLURALS[item]}{_range_text(constraints)}"


def _range_text(metadata: tuple[Any, ...]) -> str:
    bounds: list[str] = []
    for item in metadata:
        if isinstance(item, Ge):
            bounds.append(f"≥ {item.ge}")
        elif isinstance(item, Gt):
            bounds.append(f"> {item.gt}")
        elif isinstance(item, Lt):
            bounds.append(f"< {item.lt}")
        elif isinstance(item, Le) and isinstance(item.le, int) and item.le < _GUARD:
            bounds.append(f"≤ {item.le}")
    return f" {' and '.join(bounds)}" if bounds else ""
