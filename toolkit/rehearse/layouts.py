"""Which layouts are rehearsed: those that the engines offer, and the recipe's own.

This module only lists candidates. The recipe's checks decide whether they are legal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from toolkit.backend import BACKENDS, Backend, Rehearsed
from toolkit.errors import Problem, RecipeError
from toolkit.layout import Layout, ModelName, Pair
from toolkit.plan import dimensions
from toolkit.plan.dimensions import degrees_text, scaled_down, settings
from toolkit.plan.plan import Plan
from toolkit.plan.rules.legality import table
from toolkit.recipe.schema import ParallelSection, Recipe, ZeroSection

OWN = "recipe"
"""Name of the recipe's own layout."""


@dataclass(frozen=True)
class RehearsedLayout:
    """A layout to try, as settings of a recipe."""

    name: str
    processes: int
    parallel: ParallelSection
    """The complete `parallel` settings, without `auto`."""
    note: str = ""
    """What was changed to make the recipe's own layout fit. Empty if nothing."""


def _offered() -> Iterator[tuple[Backend, Rehearsed]]:
    """What every engine offers: engines without a configuration first, then transformers'
    model before megatron-core's, few processes before many, and what `auto` prefers."""

    def place(offer: tuple[Backend, Rehearsed]) -> tuple[bool, ModelName, int, int]:
        backend, one = offer
        order = [*table()].index(Pair(backend.name, one.model))
        return backend.configured, one.model, one.layout.world, order

    backends = [BACKENDS[name] for name in BACKENDS.names]
    offers = [(backend, one) for backend in backends for one in backend.rehearsals]
    return iter(sorted(offers, key=place))


def on_one_process() -> Iterator[RehearsedLayout]:
    """The standard layouts, and every engine, on one device."""
    seen: list[ParallelSection] = []
    for backend, one in _offered():
        small = scaled_down(one.layout, 1)
        section = _section(Pair(backend.name, one.model), small, ZeroSection())
        if section not in seen:
            seen.append(section)
            name = degrees_text(backend.name, one.model, small)
            yield RehearsedLayout(name.replace(" ", "-").replace("/", "-"), 1, section)


def _section(pair: Pair, layout: Layout, zero: ZeroSection) -> ParallelSection:
    """A layout as settings in which no `auto` is left. `zero` names files and folders."""
    prefix = "parallel."
    stated = {
        key.removeprefix(prefix): value
        for key, value in settings(layout).items()
        if key.startswith(prefix)
    }
    section = ParallelSection(engine=pair.engine, model=pair.model, zero=zero)
    return section.with_values(stated)


STANDARD: tuple[RehearsedLayout, ...] = tuple(
    RehearsedLayout(
        one.name,
        one.layout.world,
        _section(Pair(backend.name, one.model), one.layout, ZeroSection()),
    )
    for backend, one in _offered()
)
"""What every rehearsal tries, in this order."""


def candidates(recipe: Recipe, plan: Plan, processes: int) -> list[RehearsedLayout]:
    """The recipe's own layout, scaled down to `processes`, and then the standard ones.

    If its own layout is among the standard ones, that one comes first instead.
    """
    own = own_layout(recipe.parallel.zero, plan, processes)
    same = [
        one
        for one in STANDARD
        if (one.processes, one.parallel) == (own.processes, own.parallel)
    ]
    first = replace(same[0], note=own.note) if same else own
    return [first, *(one for one in STANDARD if one.name != first.name)]


def select(found: Sequence[RehearsedLayout], patterns: Sequence[str]) -> list[RehearsedLayout]:
    """The layouts whose names match one of the glob `patterns`. All of them without patterns.

    The first candidate also answers to OWN. Raises RecipeError naming all layouts when a
    pattern matches none.
    """
    if not patterns:
        return list(found)
    chosen: set[str] = set()
    for pattern in patterns:
        matching = {one.name for one in found if fnmatchcase(one.name, pattern)}
        if fnmatchcase(OWN, pattern):
            matching.add(found[0].name)
        if not matching:
            known = ", ".join(dict.fromkeys([OWN, *(one.name for one in found)]))
            raise RecipeError(
                [Problem("--layouts", repr(pattern), f"names and globs of: {known}")]
            )
        chosen |= matching
    return [one for one in found if one.name in chosen]


def own_layout(zero: ZeroSection, plan: Plan, processes: int) -> RehearsedLayout:
    """The recipe's own layout with every degree brought down to its smallest prime factor.

    A degree that exceeds `processes` becomes 1, as the note states.
    """
    layout = plan.layout
    small = scaled_down(layout, processes)
    section = _section(Pair(plan.engine, plan.model), small, zero)
    full, scaled = _degrees_text(layout), _degrees_text(small)
    note = "" if full == scaled else f"{full} scaled down to {scaled}"
    return RehearsedLayout(OWN, small.world, section, note)


def _degrees_text(layout: Layout) -> str:
    shown = dimensions.degrees(layout) | ({"dp": layout.dp} if layout.dp > 1 else {})
    return " ".join(f"{name}{degree}" for name, degree in shown.items()) or "one process"
