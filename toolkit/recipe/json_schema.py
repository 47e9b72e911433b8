"""The recipe as a JSON Schema, for editors: pydantic's, as YAML language servers read it.

Draft 7, which all of them know. It judges one file: a recipe with `extends` need not state what
others require. Rules that join two settings are `dmt check`'s.
"""

from collections.abc import Mapping
from typing import Any

from toolkit import __version__
from toolkit.recipe.schema import Recipe

_EXTENDS = {
    "description": "Files that this recipe is based on, each relative to this file, or "
    "`recipes:…` for a shipped one; of several, the last takes precedence.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ],
}
_RENAMED = {"prefixItems": "items", "oneOf": "anyOf"}
"""Draft 7's word. A map whose `kind` another file states may be one of several."""
_LEFT_OUT = ("accepts", "title", "required", "discriminator")


def json_schema() -> dict[str, Any]:
    """The schema of a recipe file. Every setting with its text."""
    made = Recipe.model_json_schema()
    definitions = made["$defs"]
    sections = {
        name: {"required": definition["required"]}
        for name, value in made["properties"].items()
        if "required" in (definition := definitions.get(_name(value), {}))
    }
    plain = _plain(made)
    plain["properties"] = {"extends": _EXTENDS} | plain["properties"]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": f"urn:dmt:recipe:{__version__}",
        "title": "A recipe of DMT",
        **plain,
        "if": {"required": ["extends"]},
        "else": {"required": made["required"], "properties": sections},
    }


def _name(value: Mapping[str, Any]) -> str:
    """The name of the section that a setting is. Empty for others."""
    return str(value.get("$ref", "")).rpartition("/")[2]


def _plain(node: Any) -> Any:
    """A part of the schema in draft 7, without what holds for whole recipes alone."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            plain[key] = {name: _plain(inner) for name, inner in value.items()}
        elif key in ("default", "enum", "const"):
            plain[key] = value
        elif key == "description":
            plain[key] = " ".join(value.split())
        elif key not in _LEFT_OUT:
            plain[_RENAMED.get(str(key), str(key))] = _plain(value)
    return plain
