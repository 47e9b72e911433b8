"""Settings in nested maps by their dotted names: `data.train.path`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings inside nested sections, by dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as sections."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        put(made, key, value)
    return made


def get(values: Any, key: str) -> Any:
    """The value at a dotted name. None where it or a section above it is missing."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def put(values: dict[str, Any], key: str, value: object) -> None:
    """Set the value at a dotted name, adding sections as needed."""
    *sections, name = key.split(".")
    for section in sections:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[name] = value


def is_within(key: str, sections: Iterable[str]) -> bool:
    """Whether a dotted key is one of these sections or settings, or in one."""
    return any(key == one or key.startswith((f"{one}.", f"{one}[")) for one in sections)
