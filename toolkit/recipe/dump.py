"""A `Recipe` → YAML with every default written out; loads back to an equal recipe."""

import io
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_text import NumberError, resolve_plain

_SAFE_UNQUOTED = re.compile(r"[A-Za-z_./][A-Za-z0-9_./ -]*[A-Za-z0-9_./-]|[A-Za-z]")
_YAML_1_1_WORDS = frozenset(("y", "n", "yes", "no", "on", "off"))
_STR = "tag:yaml.org,2002:str"
_FLOAT = "tag:yaml.org,2002:float"
_NO_FOLDING = 2**16


class _Representer(SafeRepresenter):
    """Quotes every text that any YAML reader could take for something else."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - base class's signature
        return True

    def represent_text(self, data: str) -> ScalarNode:
        return self.represent_scalar(_STR, data, None if _is_plain(data) else '"')

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


def _is_plain(text: str) -> bool:
    if not _SAFE_UNQUOTED.fullmatch(text) or text.lower() in _YAML_1_1_WORDS:
        return False
    try:
        return isinstance(resolve_plain(text), str)
    except NumberError:
        return False
