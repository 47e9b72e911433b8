"""Which layouts are rehearsed: those that the engines offer, and the recipe's own.

This module only lists candidates; the recipe's checks decide whether they are legal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from toolkit.backend import BACKENDS, Backend, Rehearsed
from toolkit.errors import Problem, RecipeError
from toolkit.layout import Layout, ModelName, Pair, degrees_text
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import ParallelSection, Recipe, ZeroSection
from toolkit.rehearse.shrink import Degree, Degrees

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
    """What was changed to make the recipe's own layout fit; empty if nothing."""


def _offered() -> Iterator[tuple[Backend, Rehearsed]]:
    """What every engine offers: engines without a configuration first, then transformers'
    model before megatron-core's, few processes before many, and what `auto` prefers."""

    def place(offer: tuple[Backend, Rehearsed]) -> tuple[bool, ModelName, int, int]:
        backend, one = offer
        preference = backend.supports[one.model].preference
        return backend.configured, one.model, one.layout.world, preference

    backends = [BACKENDS[name] for name in BACKENDS.names]
    offers = [(backend, one) for backend in backends for one in backend.rehearsals]
    return iter(sorted(offers, key=place))


def _standard() -> Iterator[RehearsedLayout]:
    for backend, one in _offered():
        section = _section(Pair(backend.name, one.model), one.layout, ZeroSection())
        yield RehearsedLayout(one.name, one.layout.world, section)


def on_one_process() -> Iterator[RehearsedLayout]:
    """The standard layouts, and every engine, on one device."""
    seen: list[ParallelSection] = []
    for backend, one in _offered():
        small = _scaled_down(one.layout, 1)
        section = _section(Pair(backend.name, one.model), small, ZeroSection())
        if section not in seen:
            seen.append(section)
            name = degrees_text(backend.name, one.model, small)
            yield RehearsedLayout(name.replace(" ", "-").replace("/", "-"), 1, section)


def _section(pair: Pair, layout: Layout, zero: ZeroSection) -> ParallelSection:
    """A layout as settings in which no `auto` is left; `zero` names files and folders."""
    prefix = "parallel."
    stated = {
        key.removeprefix(prefix): value
        for key, value in layout.settings.items()
        if key.startswith(prefix)
    }
    section = ParallelSection(engine=pair.engine, model=pair.model, zero=zero)
    return section.with_values(stated)


STANDARD: tuple[RehearsedLayout, ...] = tuple(_standard())
"""What every rehearsal tries, in this order."""


def candidates(recipe: Recipe, plan: Plan, processes: int) -> list[RehearsedLayout]:
    """The recipe's own layout, scaled down to `processes`, and then the standard ones.

    If its own layout is among the standard ones, that one comes first instead.
    """
    own = own_layout(recipe.parallel.zero, plan, processes)
    parallel = own.parallel.model_copy(update={"overlap": recipe.parallel.overlap})
    own = replace(own, parallel=parallel)
    same = [one for one in STANDARD if _does(one) == _does(own)]
    first = replace(same[0], note=own.note) if same else own
    return [first, *(one for one in STANDARD if one.name != first.name)]


def select(found: Sequence[RehearsedLayout], patterns: Sequence[str]) -> list[RehearsedLayout]:
    """Those whose names match one of the glob `patterns`; all of them without patterns.

    The first candidate also answers to OWN. Raises RecipeError naming all layouts when a
    pattern matches none.
    """
    if not patterns:
        return list(found)
    names = [{one.name} | ({OWN} if one is found[0] else set()) for one in found]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for group in names for name in group):
            known = ", ".join(dict.fromkeys([OWN, *(one.name for one in found)]))
            raise RecipeError(
                [Problem("--layouts", repr(pattern), f"names and globs of: {known}")]
            )
    return [
        one
        for one, group in zip(found, names, strict=True)
        if any(fnmatchcase(name, pattern) for pattern in patterns for name in group)
    ]


def own_layout(zero: ZeroSection, plan: Plan, processes: int) -> RehearsedLayout:
    """The recipe's own layout with every degree brought down to its smallest prime factor.

    A degree that exceeds `processes` becomes 1, as the note states.
    """
    layout = plan.layout
    small = _scaled_down(layout, processes)
    section = _section(Pair(plan.engine, plan.model), small, zero)
    full, scaled = _degrees_text(layout), _degrees_text(small)
    note = "" if full == scaled else f"{full} scaled down to {scaled}"
    return RehearsedLayout(OWN, small.world, section, note)


def degrees(plan: Plan) -> Degrees:
    """The degrees that divide the model in the recipe's own layout, and their replacements
    here."""
    layout = plan.layout
    stages = Degree(layout.pp * layout.vpp, _smallest(layout.pp) * _smallest(layout.vpp))
    return Degrees(
        Degree(layout.tp, _smallest(layout.tp)),
        stages,
        Degree(layout.ep, _smallest(layout.ep)),
    )


def _does(candidate: RehearsedLayout) -> tuple[int, ParallelSection]:
    return candidate.processes, candidate.parallel


def _scaled_down(layout: Layout, processes: int) -> Layout:
    """The same kind of layout with at most `processes` ranks."""
    # Experts are spread over data-parallel ranks, so those come earlier where there are any.
    order = ("tp", "dp", "pp") if layout.ep > 1 else ("tp", "pp", "dp")
    experts = _smallest(layout.ep)
    small: dict[str, int] = {}
    room = processes
    grouped = layout.replicate > 1 or layout.hpz > 1
    for name in order:
        # 2 data-parallel ranks suffice, except if experts are sharded over more, or shards or
        # weights are replicated.
        most = max(2, experts, 4 if grouped else 0)
        degree = min(layout.dp, most) if name == "dp" else _smallest(getattr(layout, name))
        small[name] = degree if degree <= room else 1
        room //= small[name]
    return Layout(
        **small,
        vpp=_smallest(layout.vpp) if small["pp"] > 1 else 1,
        ep=experts if small["tp"] * small["dp"] % experts == 0 else 1,
        sequence_parallel=layout.sequence_parallel and small["tp"] > 1,
        zero_stage=layout.zero_stage,
        replicate=2 if layout.replicate > 1 and small["dp"] == 4 else 1,
        hpz=2 if layout.hpz > 1 and small["dp"] == 4 else 1,
        offload_optimizer=layout.offload_optimizer,
        offload_parameters=layout.offload_parameters,
        recompute=1 if isinstance(layout.recompute, int) else layout.recompute,
        loss=layout.loss,
        compile=layout.compile,
        fused=layout.fused,
        experts=layout.experts,
    )


def _smallest(degree: int) -> int:
    """The smallest prime factor; 1 for 1."""
    return next((n for n in range(2, degree + 1) if degree % n == 0), 1)


def _degrees_text(layout: Layout) -> str:
    shown = [
        f"{name}{getattr(layout, name)}"
        for name in ("tp", "pp", "vpp", "ep", "dp")
        if getattr(layout, name) > 1
    ]
    return " ".join(shown) or "one process"
