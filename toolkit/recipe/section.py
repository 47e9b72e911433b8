"""The base class of a recipe's sections, and the types of values that many of them have."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core.core_schema import CoreSchema, literal_schema


@dataclass(frozen=True)
class Wording:
    """The words for what a type accepts, where its constraints alone do not read well."""

    text: str

    def __get_pydantic_json_schema__(self, core: Any, schema_of: Any) -> dict[str, Any]:
        """The type's JSON Schema with `accepts`, which only this project reads."""
        return {**schema_of(core), "accepts": self.text}


Auto: TypeAlias = Literal["auto"]
Name: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"),
    Wording("letters, digits, `.`, `_` and `-`, beginning with a letter or digit, at most 100"),
]


def legal_name(text: str, otherwise: str = "") -> str:
    """A text in the letters that a `Name` may have. `otherwise` if none are left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100] or otherwise


NonEmpty: TypeAlias = Annotated[str, Field(min_length=1, max_length=4096)]
Positive: TypeAlias = Annotated[int, Field(ge=1, le=2**40)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=2**40)]
Degree: TypeAlias = Annotated[int, Field(ge=1, le=65536)]
NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class OneOf:
    """Annotates a text that is one of the words that are known when the program starts."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """A literal of these words."""
        return literal_schema([*self.words])


class Section(BaseModel):
    """Base of every part of a recipe: frozen, strict, no unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    def with_values(self, values: Mapping[str, object]) -> Self:
        """A copy with other values, by the dotted paths of settings. They are not checked."""
        changed: dict[str, Any] = {}
        inside: dict[str, dict[str, object]] = {}
        for path, value in values.items():
            name, _, rest = path.partition(".")
            if rest:
                inside.setdefault(name, {})[rest] = value
            else:
                assert name in type(self).model_fields, path
                changed[name] = value
        for name, inner in inside.items():
            changed[name] = getattr(self, name).with_values(inner)
        return self.model_copy(update=changed)
