"""What a search found, as data and as lines for a terminal."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.text import Text

from toolkit.cli.output import Table
from toolkit.extras.tune.space import SearchSpace
from toolkit.recipe.describe import plain_text

_SHOWN = 10
"""Trials in the terminal's table, the best ones."""
_DIGITS = 4
COLOURS = {"done": "green", "stopped": "yellow", "running": "cyan"}


@dataclass(frozen=True)
class TriedPoint:
    """One trial of a search."""

    number: int
    ending: str
    """As of a trial (`TrialResult`), or `refused`, `diverged` or `running`."""
    settings: Mapping[str, Any]
    loss: float | None
    """At its end or, where it was stopped, at its last step."""
    steps: int
    reason: str = ""


@dataclass(frozen=True)
class SearchOutcome:
    """All trials of a search, and what they say."""

    name: str
    space: SearchSpace
    points: tuple[TriedPoint, ...]
    importance: Mapping[str, float]
    """Share of each setting in how good a trial is (PED-ANOVA, arXiv:2304.10255); empty with
    too few trials."""
    validation: bool

    @property
    def ranked(self) -> list[TriedPoint]:
        """The best first: those that came to their end, then the others by their steps."""

        def rank(one: TriedPoint) -> tuple[bool, int, float]:
            loss = one.loss if one.loss is not None else math.inf
            return one.ending != "done", -one.steps * (one.ending != "done"), loss

        return sorted(self.points, key=rank)

    @property
    def best(self) -> TriedPoint | None:
        """The best trial of those that came to their end."""
        first = self.ranked[:1]
        return first[0] if first and first[0].ending == "done" else None

    @property
    def loss_name(self) -> str:
        """What trials are compared by."""
        return "validation loss" if self.validation else "training loss"

    def machine_output(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "best": self.best,
            "importance": dict(self.importance),
            "measure": self.loss_name,
            "trials": self.points,
        }


def outcome_of(search: Any) -> SearchOutcome:
    """What a `HyperparameterSearch` has found so far."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    from toolkit.extras.tune.search import validates

    points, space = [], search.request.space
    for one in search.study.get_trials(deepcopy=False):
        facts = one.user_attrs.get("result", {})
        ending = facts.get("ending", "running")
        last = one.last_step
        loss = one.value if ending == "done" else one.intermediate_values.get(last)
        reason = str(facts.get("reason", ""))
        settings = {key: one.params[key] for key in space.keys if key in one.params}
        steps = int(facts.get("steps", last or 0))
        points.append(TriedPoint(one.number, ending, settings, loss, steps, reason))
    losses = [one.loss for one in points if one.ending == "done"]
    importance: dict[str, float] = {}
    if len(set(losses)) > 1:
        evaluator = PedAnovaImportanceEvaluator()
        importance = get_param_importances(search.study, evaluator=evaluator)
    recipe = search.recipe
    return SearchOutcome(recipe.name, space, tuple(points), importance, validates(recipe))


def _value(value: Any) -> str:
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else plain_text(value)


def _loss(one: TriedPoint) -> str:
    return "-" if one.loss is None else f"{one.loss:.4f}"


def _table(outcome: SearchOutcome) -> Table[TriedPoint]:
    shown = _short_names(outcome.space.keys)
    return Table(
        {
            "trial": lambda one: str(one.number),
            "ended": lambda one: one.ending,
            "steps": lambda one: f"{one.steps:,}",
            outcome.loss_name: _loss,
            **{shown[key]: partial(_setting, key) for key in outcome.space.keys},
        },
        left=2,
    )


def _setting(key: str, one: TriedPoint) -> str:
    return _value(one.settings.get(key, "-"))


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last component of each key where that is enough to tell them apart."""
    names = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if names.count(name) == 1 else key
        for key, name in zip(keys, names, strict=True)
    }


def outcome_lines(outcome: SearchOutcome) -> Iterator[Text]:
    """The best trials and the importance of each setting."""
    ranked = outcome.ranked
    counts = [one.ending for one in outcome.points]
    said = ", ".join(f"{counts.count(one)} {one}" for one in dict.fromkeys(counts))
    yield Text.assemble((outcome.name, "bold"), f"  {len(ranked)} trials: {said}")
    table = _table(outcome)
    for row, line in table.coloured(
        ranked[:_SHOWN], lambda one: (one.ending, COLOURS.get(one.ending, "red"))
    ):
        yield Text("  ") + (Text(line.plain, "bold") if row is outcome.best else line)
    if outcome.importance:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in outcome.importance.items())
        yield Text(f"  importance: {shares}")
