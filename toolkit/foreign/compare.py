"""Compares the settings of another place with those of the recipe and its plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.engines.deepspeed.config import same
from toolkit.foreign.base import (
    AUTO,
    DATA_PARALLEL,
    AtMost,
    Nearest,
    OneOf,
    OverContext,
    PerReplica,
    SettingSource,
    ShareOfSteps,
    Stated,
    shown,
)
from toolkit.foreign.facts import DERIVED, Fact
from toolkit.recipe.describe import choices, settings
from toolkit.text.redact import redact

Verdict = Literal["agrees", "disagrees", "auto", "open"]
"""`auto`: takes the recipe's value. `open`: shows only when it runs."""


@dataclass(frozen=True)
class SettingComparison:
    """One setting that both places state."""

    key: str
    """The recipe's key; a word of `DERIVED` for what it implies."""
    recipe: str
    """The recipe's value, or the plan's where it is `auto`; empty where none is known yet."""
    origin: str
    """Where that comes from: `FILE:LINE`, `default`, `planned`, `derived: …`."""
    name: str
    """What the setting is called there."""
    other: str
    """Its value there, as written."""
    place: str
    """`FILE:LINE`, or the variable."""
    verdict: Verdict
    winner: str
    """Which takes precedence; empty where the two agree."""
    advice: str
    """What to do; empty where the two agree."""
    breaks: bool
    """Whether a run that starts all the same would fail or train something else."""


@dataclass(frozen=True)
class Report:
    """The comparison with one other place."""

    source: SettingSource
    compared: tuple[SettingComparison, ...]

    @property
    def conflicts(self) -> tuple[SettingComparison, ...]:
        """The settings that disagree."""
        return tuple(row for row in self.compared if row.verdict == "disagrees")

    @property
    def agrees(self) -> bool:
        """Nothing disagrees, and no name is misspelt."""
        return not self.conflicts and not self.source.unknown


def compare(source: SettingSource, facts: Mapping[str, Fact]) -> Report:
    """Judge every setting of `source` that the recipe states as well."""
    return Report(source, tuple(_judge(stated, source, facts) for stated in source.stated))


def _judge(
    stated: Stated, source: SettingSource, facts: Mapping[str, Fact]
) -> SettingComparison:
    stated = _multiplied(stated, facts)
    fact = facts.get(stated.key)
    verdict = _verdict(stated, fact)
    winner = advice = ""
    if verdict == "disagrees":
        assert fact is not None, "what is compared has a value"
        winner = stated.winner or source.winner
        advice = stated.advice or _advice(stated, fact)
    elif verdict == "auto":
        winner = "recipe"
    elif verdict == "open":
        advice = stated.advice or "the recipe leaves it open until the run is planned"
    return SettingComparison(
        key=stated.key,
        recipe="" if fact is None else redact(shown(fact.value)),
        origin="" if fact is None else fact.origin,
        name=stated.at.name,
        other=redact(stated.at.written),
        place=stated.at.place,
        verdict=verdict,
        winner=winner,
        advice=redact(advice),
        breaks=verdict == "disagrees" and stated.breaks,
    )


def _multiplied(stated: Stated, facts: Mapping[str, Fact]) -> Stated:
    """A batch per replica as the global one, where the number of replicas is known; a share of
    the steps as a number of them."""
    if isinstance(stated.value, OverContext):
        batch, degree = stated.value.sequences, facts.get("parallel.context")
        if degree is None or degree.value in (1, AUTO) or batch % int(str(degree.value)):
            return replace(stated, value=batch)
        return replace(stated, value=OneOf((batch, batch // int(str(degree.value)))))
    if isinstance(stated.value, ShareOfSteps):
        steps = facts.get("training.steps")
        if steps is None:
            key, share = "schedule.warmup_ratio", stated.value.share
            return replace(stated, key=key, value=share, certain=key in facts)
        share = math.ceil(stated.value.share * int(str(steps.value)))
        at = replace(stated.at, text=f"{stated.at.written} · {steps.value} steps = {share}")
        return replace(stated, value=share, at=at)
    if not isinstance(stated.value, PerReplica):
        return stated
    replicas = facts.get(DATA_PARALLEL)
    if replicas is None:
        return replace(stated, certain=False)
    assert isinstance(replicas.value, int)
    batch = stated.value.sequences * replicas.value
    at = replace(stated.at, text=f"{stated.at.text} = {batch}")
    return replace(stated, value=batch, at=at)


def _verdict(stated: Stated, fact: Fact | None) -> Verdict:
    if stated.value == AUTO:
        return "auto"
    if fact is None or not stated.certain:
        return "open"
    if isinstance(stated.value, AtMost):
        assert isinstance(fact.value, int)
        return "agrees" if fact.value <= stated.value.limit else "disagrees"
    values = stated.value.values if isinstance(stated.value, OneOf) else (stated.value,)
    return "agrees" if any(_same(value, fact.value) for value in values) else "disagrees"


def _same(value: object, ours: object) -> bool:
    """A map in a list states what it names: of a data source, say, and not its defaults."""
    if isinstance(value, Mapping) and isinstance(ours, Mapping):
        return all(_same(one, ours.get(name)) for name, one in value.items())
    if isinstance(value, list) and isinstance(ours, list) and len(value) == len(ours):
        return all(map(_same, value, ours))
    return same(value, ours)


def _advice(stated: Stated, fact: Fact) -> str:
    """The two ways to make both say the same."""
    name, place = stated.at.name, stated.at.place
    there = f"unset {name}" if name == place else f"change {name} at {place}"
    if stated.key in DERIVED:
        return f"{there}; the recipe's is {DERIVED[stated.key]}"
    if _can_be_set(stated.key, stated.value):
        return f"--set {stated.key}={shown(stated.value).replace(' ', '')}, or {there}"
    return f"{there} to mean {stated.key} {shown(fact.value)}, or change the recipe"


def _can_be_set(key: str, value: object) -> bool:
    """Whether a recipe can say the same with one `--set`."""
    if isinstance(value, OneOf | AtMost | Nearest | ShareOfSteps) or key not in settings():
        return False
    words = choices(settings()[key].info.annotation)
    return not words or not isinstance(value, str) or value in words
