"""The seam of features: what a recipe turns on beyond model, data, optimizer and layout.

Everything that schema, checks, planner, ledger, engines, rehearsal and doctor ask about a
feature is in its `Feature`. They ask all that a recipe turns on, and name none.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, Literal, TypeVar

from pydantic import create_model
from pydantic.fields import FieldInfo

from toolkit.recipe.section import Section
from toolkit.registry import Registry, load

AnyRecipe = TypeVar("AnyRecipe", bound=Section)
AnySection = TypeVar("AnySection", bound=type[Section])
Hook = str
"""`module:function`, imported when first called; empty: nothing to do."""
Settings = Mapping[str, Section]
"""Settings of the features that are on, by the feature's name."""


@dataclass(frozen=True)
class Feature:
    """One feature. Each hook's signature is in the comment above it."""

    name: str
    section: type[Section]
    """Its settings in a recipe."""
    inside: Literal["", "parallel.zero"] = ""
    """The section of the recipe, by its dotted path, that has the fields of `section`; empty:
    the recipe has `section` as a whole, or null, under the feature's name."""
    under: Literal["", "parallel"] = ""
    """The section of the recipe that has `section` as a whole; empty: the recipe itself."""
    # (recipe) -> Iterator[Problem]
    check: Hook = ""
    """What it requires of the recipe's other settings."""
    reads: tuple[str, ...] = ()
    """Those settings; `check` is skipped where one is wrong."""
    # (settings, parallel: ParallelSection, pair: Pair | None, ranks: int | None)
    #     -> Iterator[Problem]
    intent: Hook = ""
    """What it requires of `parallel`, whatever the model: alone, on a pair of engine and model,
    or (`ranks`) of so many data-parallel ranks. It must be `inside` of `parallel`."""
    degrees: tuple[str, ...] = ()
    """Fields of `Layout` with the values of its keys of the same names, or 1."""
    # (job: PlanRequest, pair: Pair) -> Iterator[Problem]
    refuse: Hook = ""
    """Why an engine cannot train a model with it."""
    # (workload: Workload, settings) -> Workload
    cost: Hook = ""
    """Its effect on memory, traffic and time."""
    # (settings, plan, spec: ModelSpec, engine_config) -> Iterator[(kind, what, why)]
    ledger: Hook = ""
    """Its entries of the ledger."""
    # (settings, spec: ModelSpec) -> Iterator[str]
    reasons: Hook = ""
    """What a plan says about it."""
    # (model: nn.Module, settings) -> None
    apply: Hook = ""
    """Changes a transformers model before it is sharded; also the rehearsal's reference."""
    # (objective: Objective, settings) -> Objective
    objective: Hook = ""
    """Changes what is minimised."""
    # (loss: Tensor, settings) -> Tensor
    reference_loss: Hook = ""
    """The same for the mean loss of the rehearsal's reference."""
    # (recipe, settings) -> Recipe
    resolve: Hook = ""
    """The recipe that is planned and run instead; of that one, itself."""
    # (order: Order, settings) -> Order
    order: Hook = ""
    """Changes which samples are trained when."""
    # (engine: Engine, settings, start: Start) -> Engine
    attach: Hook = ""
    """What trains instead of the engine, once that has the state of its checkpoint."""
    # (assignment, settings, origin: Origin, cluster: str | None, changes)
    #     -> InsteadOfRanks | None
    launch: Hook = ""
    """What `dmt launch` starts instead of the run's ranks; None: these."""
    # (settings) -> Section | None
    rehearse: Hook = ""
    """Its settings for the small model of a rehearsal; without it, those of the recipe."""
    bounds: tuple[float, float] | None = None
    """Relative differences of loss and gradient norm from fp32 that a small model with the
    defaults may have, which `dmt doctor --selftest` then trains; None: not tried."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distributions that it needs, and the module of each."""
    excludes: frozenset[str] = frozenset()
    """What it is not combined with: `adapter`, `liger` (its kernels), `scripts` (those of
    Accelerate, whose model is their own), `trials` (of `dmt tune`)."""
    foreign: Mapping[str, str] = field(default_factory=dict)
    """Names of other tools for its settings, separated by spaces, by the setting."""
    foreign_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Values of other tools for other settings: what to write instead, by setting and value."""

    def call(self, hook: str, *arguments: Any) -> Any:
        """What the hook of this name returns."""
        return load(getattr(self, hook))(*arguments)

    @property
    def path(self) -> str:
        """The dotted path of its settings."""
        return self.inside or (f"{self.under}.{self.name}" if self.under else self.name)

    @property
    def fields(self) -> Mapping[str, FieldInfo]:
        """What it adds to the section that it is inside of."""
        if self.inside:
            return self.section.model_fields
        key: Any = {self.name: (self.section | None, None)}
        return create_model(self.name, __base__=Section, **key).model_fields

    def values(self, settings: Section | None) -> dict[str, object]:
        """The recipe's values, by dotted path, that state these settings."""
        if not self.inside:
            return {self.path: settings}
        return {f"{self.inside}.{name}": getattr(settings, name) for name in self.fields}

    def stated(self, recipe: Section) -> Section | None:
        """Its settings in a recipe; None where it is off."""
        if not self.inside:
            return attrgetter(self.path)(recipe)  # type: ignore[no-any-return]
        return self.read(attrgetter(self.inside)(recipe))

    def read(self, around: Section) -> Section | None:
        """Its settings in the section that it is inside of; None where all are defaults, as a
        degree of 1 and a switch that is off are."""
        values: dict[str, Any] = {}
        keys = self.section.model_fields.items()
        for name, key in keys:
            value = getattr(around, name)
            values[name] = None if value is False and key.default is None else value
        for degree in self.degrees:
            if values[degree] == 1:
                values[degree] = None
        off = all(values[name] == key.default for name, key in keys)
        return None if off else self.section.model_construct(**values)


FEATURES: Registry[Feature] = Registry(
    "dmt.features",
    {
        "fp8": "toolkit.features.fp8:FEATURE",
        "outer": "toolkit.extras.outer:FEATURE",
    },
)
"""Every feature by its name; other packages add theirs as entry points."""


def features_of(recipe: Section) -> dict[str, Section]:
    """The settings of every feature that a recipe turns on, by the feature's name."""
    found = ((feature.name, feature.stated(recipe)) for feature in FEATURES.values())
    return {name: settings for name, settings in found if settings is not None}


def hooks(hook: str, settings: Settings) -> Iterator[tuple[Callable[..., Any], Section]]:
    """The hook of this name of every feature that is on and has it, with its settings."""
    for name, section in settings.items():
        feature = FEATURES[name]
        if getattr(feature, hook):
            yield lambda *arguments, one=feature: one.call(hook, *arguments), section


def changed(hook: str, value: Any, settings: Settings) -> Any:
    """`value` as every feature that is on returns it from the hook of this name."""
    for change, section in hooks(hook, settings):
        value = change(value, section)
    return value


def inside_engines(settings: Settings) -> Settings:
    """Those of the features that change what an engine computes."""
    return {name: one for name, one in settings.items() if not FEATURES[name].attach}


def resolved(recipe: AnyRecipe) -> AnyRecipe:
    """See `Feature.resolve`: what all features that are on make of a recipe."""
    for resolve, settings in hooks("resolve", features_of(recipe)):
        recipe = resolve(recipe, settings)
    return recipe


def with_features(path: str, after: str) -> Callable[[AnySection], AnySection]:
    """A decorator of the recipe's section at `path`: adds the settings of the features that
    belong there, behind the field `after`."""

    def add(section: AnySection) -> AnySection:
        own = section.__pydantic_fields__
        place = [*own].index(after) + 1
        fields = list(own.items())
        added = [
            item
            for feature in FEATURES.values()
            if (feature.inside or feature.under) == path
            for item in feature.fields.items()
        ]
        section.__pydantic_fields__ = dict([*fields[:place], *added, *fields[place:]])
        section.model_rebuild(force=True)
        return section

    return add


def intent_problems(
    parallel: Section, pair: Any = None, ranks: int | None = None
) -> Iterator[Any]:
    """See `Feature.intent`: the problems of all features that are on."""
    for feature, around in _judging_intent():
        if (settings := feature.read(around(parallel))) is not None:
            yield from feature.call("intent", settings, parallel, pair, ranks)


@cache
def _judging_intent() -> list[tuple[Feature, Callable[[Section], Section]]]:
    """Features with the hook `intent`, and where in `parallel` their settings are."""
    return [
        (one, attrgetter(one.inside.removeprefix("parallel.")))
        for one in FEATURES.values()
        if one.intent
    ]


def excluding(what: str, settings: Settings) -> list[str]:
    """Names of the features that are on and are not combined with this."""
    return [name for name in settings if what in FEATURES[name].excludes]


def rehearsed(recipe: Section) -> dict[str, object]:
    """The settings that features have in the small model of a rehearsal, by dotted path."""
    found: dict[str, object] = {}
    for name, settings in features_of(recipe).items():
        if FEATURES[name].rehearse:
            small = FEATURES[name].call("rehearse", settings)
            found |= FEATURES[name].values(small)
    return found
