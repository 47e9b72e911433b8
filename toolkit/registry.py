"""Kinds of a thing by name: those of this package and those that other packages add.

A package adds one by an entry point (`pyproject.toml`, `[project.entry-points."dmt.engines"]`),
so every process of a run knows it, whoever started it.
"""

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

Kind = TypeVar("Kind")


class Registry(Generic[Kind]):
    """Names and the objects that they stand for, which are imported when first asked for."""

    def __init__(self, group: str, own: Mapping[str, str]) -> None:
        """`own` maps a name to `module:attribute`; `group` names the entry points of others."""
        self._group = group
        self._own = own
        self._loaded: dict[str, Kind] = {}

    @cached_property
    def _places(self) -> dict[str, str]:
        others = {point.name: point.value for point in entry_points(group=self._group)}
        return {**self._own, **{name: others[name] for name in others if name not in self._own}}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, this package's own first."""
        return tuple(self._places)

    def __getitem__(self, name: str) -> Kind:
        """The object called `name`. Raises KeyError for an unknown name."""
        if name not in self._loaded:
            place = self._own.get(name) or self._places[name]
            module, _, attribute = place.partition(":")
            self._loaded[name] = getattr(import_module(module), attribute)
        return self._loaded[name]
