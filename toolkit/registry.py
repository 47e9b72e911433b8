"""Kinds of a thing by name: those of this package and those that other packages add.

A package adds one by an entry point (`pyproject.toml`, `[project.entry-points."dmt.engines"]`),
so every process of a run knows it, under any launcher.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from toolkit.errors import BackendUnavailable

Kind = TypeVar("Kind")


class Registry(Generic[Kind]):
    """Names and the objects that they stand for, which are imported when first asked for."""

    def __init__(self, group: str, own: Mapping[str, str], base: type | None = None) -> None:
        """`own` maps a name to `module:attribute`. `group` names the entry points of other
        packages. Objects are subclasses of `base`."""
        self._group = group
        self._base = base
        self._own = own
        self._loaded: dict[str, Kind] = {}

    @cached_property
    def _places(self) -> dict[str, str]:
        others = {point.name: point.value for point in _added().select(group=self._group)}
        return {**self._own, **{name: others[name] for name in others if name not in self._own}}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, this package's own first."""
        return tuple(self._places)

    def __getitem__(self, name: str) -> Kind:
        """The object called `name`.

        Raises KeyError for a name that nobody has added, BackendUnavailable where the package
        that has added it cannot be imported.
        """
        if name not in self._loaded:
            place = self._places[name]
            try:
                self._loaded[name] = self._checked(load(place))
            except (ImportError, AttributeError, TypeError) as error:
                if name in self._own:
                    raise
                raise BackendUnavailable(
                    f"{name}, which another package adds to {self._group} as {place}, cannot "
                    f"be imported: {error}",
                    fix="repair or uninstall that package",
                ) from error
        return self._loaded[name]

    def _checked(self, kind: Any) -> Any:
        base = self._base
        if base is None or (isinstance(kind, type) and issubclass(kind, base)):
            return kind
        raise TypeError(f"it does not extend {base.__module__}.{base.__qualname__}")

    def items(self) -> Iterator[tuple[str, Kind]]:
        """Every name with its object. One that cannot be imported is left out until it is
        chosen."""
        for name in self.names:
            with suppress(BackendUnavailable):
                yield name, self[name]

    def values(self) -> Iterator[Kind]:
        """The objects of `items`."""
        return (value for _, value in self.items())


def load(place: str) -> Any:
    """Import the object that `module:attribute` names."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


@cache
def _added() -> Any:  # another class before Python 3.12
    """Entry points of all packages, read once."""
    return entry_points()


ENGINES: Registry[Any] = Registry(
    "dmt.engines",
    {
        "deepspeed": "toolkit.engines.deepspeed.backend:BACKEND",
        "megatron": "toolkit.engines.megatron.backend:BACKEND",
        "fsdp": "toolkit.engines.fsdp.backend:BACKEND",
        "ddp": "toolkit.engines.ddp.backend:BACKEND",
    },
)
"""Every engine by its name, for the recipe, which knows no `Backend`. Others use `BACKENDS`."""
