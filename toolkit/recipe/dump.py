"""A `Recipe` → YAML with every default written out. Loads back to an equal recipe."""

import io
from collections.abc import Iterator, Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_text import is_plain

_STR = "tag:yaml.org,2002:str"
_FLOAT = "tag:yaml.org,2002:float"
_NO_FOLDING = 2**16
COLUMN = 34
"""Where comments begin, unless the setting is longer."""
_LINE = 125
"""Longest map or list of maps on one line."""


class _Representer(SafeRepresenter):
    """Quotes every text that any YAML reader could take for something else."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - base class's signature
        return True

    def represent_text(self, data: str) -> ScalarNode:
        return self.represent_scalar(_STR, data, None if is_plain(data) else '"')

    def represent_number(self, data: float) -> ScalarNode:
        """`1.0e-08`, never `1e-08`, which YAML 1.1 readers take for text."""
        mantissa, e, exponent = repr(data).partition("e")
        if not e or "." in mantissa:
            return super().represent_float(data)
        return self.represent_scalar(_FLOAT, f"{mantissa}.0e{exponent}")


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(float, _Representer.represent_number)
_Representer.add_representer(tuple, SafeRepresenter.represent_list)


def dump_recipe(recipe: Recipe) -> str:
    """YAML text of the whole recipe, defaults included, sections in schema order."""
    return dump(recipe.model_dump(), flow=False)


def dump(data: object, *, flow: bool) -> str:
    """YAML text of plain data: blocks, or (`flow`) everything on one line."""
    yaml: Any = YAML(typ="safe", pure=True)  # untyped: its settings are plain attributes
    yaml.Representer = _Representer
    yaml.default_flow_style = flow
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = _NO_FOLDING
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


def in_yaml(value: object) -> str:
    """`value` as a recipe states it, on one line."""
    return dump(value, flow=True).removesuffix("...\n").strip()


def commented(values: Mapping[str, Any], comments: Mapping[str, str]) -> Iterator[str]:
    """Settings in nested maps as lines of YAML, with comments by dotted name. A map stands on
    one line where it fits and has no comment inside. Other sections are paragraphs."""
    before = 1
    for name, value in values.items():
        lines = [*_lines({name: value}, comments, "")]
        yield from [""] * (max(before, len(lines)) > 1)
        yield from lines
        before = len(lines)


def _lines(
    values: Mapping[str, Any], comments: Mapping[str, str], prefix: str
) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key, line = f"{prefix}{name}", f"{indent}{name}: {in_yaml(value)}"
        comment = comments.get(key, "")
        inside = any(one.startswith(f"{key}.") for one in comments)
        items = value if isinstance(value, list | tuple) else ()
        if isinstance(value, Mapping) and value and (inside or len(line) > _LINE):
            yield _with_comment(f"{indent}{name}:", comment)
            yield from _lines(value, comments, f"{key}.")
        elif len(line) > _LINE and any(isinstance(one, Mapping) for one in items):
            yield _with_comment(f"{indent}{name}:", comment)
            yield from (f"{indent}  - {in_yaml(one)}" for one in items)
        else:
            yield _with_comment(line, comment)


def _with_comment(line: str, comment: str) -> str:
    return f"{line:<{COLUMN - 1}} # {comment}" if comment else line
