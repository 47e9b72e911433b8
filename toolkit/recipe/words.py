"""The schema in words: what a setting accepts, its dotted path, its default.

Everything is read from pydantic's JSON Schema, so that errors, `docs/recipe.md` and
`dmt schema` always say the same thing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from toolkit.recipe.schema import Recipe
from toolkit.recipe.section import Section
from toolkit.recipe.yaml_text import plain_text

Schema: TypeAlias = Mapping[str, Any]

_TYPES = {"integer": "an integer", "number": "a number", "string": "text",
          "boolean": "true or false", "null": "null", "object": "a map"}  # fmt: skip
_PLURALS = {"integer": "integers", "number": "numbers", "string": "texts"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "exclusiveMaximum": "<", "maximum": "≤"}
GUARD = 2**32
"""Upper bounds above this only guard against nonsense. Texts leave them out."""


@dataclass(frozen=True, eq=False)
class Setting:
    """One field of the schema, at its place in the recipe."""

    path: str
    """Dotted path, e.g. `parallel.zero.stage`."""
    schema: Schema
    is_required: bool

    @property
    def allowed(self) -> str:
        """The values that it accepts, in words."""
        return allowed(self.schema)

    @property
    def default(self) -> str:
        """The default as YAML would show it, or "required" without one."""
        if self.is_required:
            return "required"
        if "properties" in self.schema:
            return "see below"
        return plain_text(self.schema["default"])

    @property
    def sections(self) -> list[Schema]:
        """The sections that its value or its items may be, each once: none for plain values."""
        found: dict[str, Schema] = {}
        for one in members(self.schema):
            for item in members(one["items"]) if one.get("items") else [one]:
                if "properties" in item:
                    found[item["title"]] = item
        return list(found.values())

    @property
    def kinds(self) -> dict[str, Schema]:
        """Sections by the `kind` that chooses one of them. Empty unless they are several."""
        some = self.sections
        return (
            {} if len(some) < 2 else {one["properties"]["kind"]["const"]: one for one in some}
        )

    @property
    def choices(self) -> list[str]:
        """The words that the value may be, e.g. `auto` or `cosine`."""
        found = (one.get("enum") or [one.get("const")] for one in members(self.schema))
        return [word for words in found for word in words if isinstance(word, str)]

    def takes(self, *types: str) -> bool:
        """True if a value may be of one of JSON's types (`integer`, `array`)."""
        return any(one.get("type") in types for one in members(self.schema))

    def item(self, index: int) -> "Setting":
        """The item of that index in this setting, a list or a pair."""
        lists = next(one for one in members(self.schema) if one.get("type") == "array")
        pair = lists.get("prefixItems")
        return Setting(self.path, pair[index] if pair else lists["items"], self.is_required)


@cache
def schema_of(section: type[Section] = Recipe) -> Schema:
    """The JSON Schema of a section, with every reference replaced by what it names."""
    whole = section.model_json_schema()

    def resolved(node: Any) -> Any:
        if isinstance(node, list):
            return [resolved(one) for one in node]
        if not isinstance(node, dict):
            return node
        if reference := node.get("$ref"):
            return node | resolved(whole["$defs"][reference.rpartition("/")[2]])
        return {key: resolved(one) for key, one in node.items() if key != "$defs"}

    return dict(resolved(whole))


@cache
def settings(section: type[Section] = Recipe) -> dict[str, Setting]:
    """Every setting below `section` by dotted path, sections before their content."""
    return dict(_settings(schema_of(section), ""))


def _settings(section: Schema, prefix: str) -> Iterator[tuple[str, Setting]]:
    required = section.get("required", ())
    for name, schema in section["properties"].items():
        setting = Setting(f"{prefix}{name}", schema, name in required)
        yield setting.path, setting
        for child in setting.sections:
            yield from _settings(child, f"{setting.path}.")


def members(schema: Schema) -> list[Schema]:
    """The alternatives of a (possibly nested) union. For any other schema, itself."""
    inner = schema.get("anyOf") or schema.get("oneOf")
    return [member for one in inner for member in members(one)] if inner else [schema]


def allowed(schema: Schema) -> str:
    """The values that a schema accepts, in words: "an integer ≥ 1, or auto"."""
    every = members(schema)
    texts = [_member(one) for one in every if not _has_kind(one)]
    if tags := [one["properties"]["kind"]["const"] for one in every if _has_kind(one)]:
        texts.insert(0, f"a map with `kind` one of {', '.join(tags)}")
    return ", or ".join(texts)


def _has_kind(schema: Schema) -> bool:
    return "const" in schema.get("properties", {}).get("kind", {})


def _member(schema: Schema) -> str:
    if "accepts" in schema:
        return str(schema["accepts"])
    if "properties" in schema:
        return f"a map of {', '.join(schema['properties'])}"
    if "const" in schema:
        return plain_text(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(plain_text, schema['enum']))}"
    if schema["type"] == "array":
        return _list(schema)
    return _TYPES[schema["type"]] + _range(schema)


def _list(schema: Schema) -> str:
    pair = schema.get("prefixItems")
    count = f"a list of {len(pair)}" if pair else "a list of"
    item = pair[0] if pair else schema["items"]
    if len(members(item)) > 1:
        return f"{count} such maps"
    if "properties" in item:
        return f"{count} maps of {', '.join(item['properties'])}"
    if "enum" in item:
        return f"{count} {', '.join(item['enum'])}"
    return f"{count} {_PLURALS[item['type']]}{_range(item)}"


def _range(schema: Schema) -> str:
    bounds = [
        f"{sign} {schema[name]}"
        for name, sign in _BOUNDS.items()
        if name in schema and schema[name] < GUARD
    ]
    return f" {' and '.join(bounds)}" if bounds else ""
