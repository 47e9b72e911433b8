"""`dmt tune`: the planner's best layouts, measured for a few steps each."""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from toolkit.backend import adopt_engine_config
from toolkit.errors import PlanError
from toolkit.extras.tune.study import FAILURES, Study, TrialRecord, TuneRequest
from toolkit.extras.tune.trial import Followed
from toolkit.plan.dimensions import layout_text, settings
from toolkit.plan.estimate import Estimate
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.planner import explore, placed_on
from toolkit.plan.search import Search
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import Recipe
from toolkit.text.units import seconds

WARM_UP_STEPS = 2
"""Logged steps before the measurement, in which buffers are allocated and kernels compiled."""
_WITHOUT = {
    "logging.every_steps": 1,
    "logging.trackers": (),
    "evaluation.every_steps": None,
    "evaluation.patience": None,
    "checkpoint.every_steps": None,
    "checkpoint.keep_best": None,
    "checkpoint.export": False,
    "parallel.balance": "none",
    "launch.max_restarts": 0,
    "launch.elastic": None,
}
"""Settings that turn everything off in a trial except training."""
_NEVER = 1_000_000_000


def settings_of(candidate: Estimate) -> dict[str, Any]:
    """The settings of a recipe that ask for this layout, by dotted name."""
    engine, model = candidate.pair
    values = settings(candidate.layout) | {"parallel.engine": engine, "parallel.model": model}
    return {key: [*one] if isinstance(one, tuple) else one for key, one in values.items()}


def key_of(values: Mapping[str, Any]) -> str:
    """The key of a layout's settings, the same after they were written and read as JSON."""
    return json.dumps(values, sort_keys=True)


def named(candidate: Estimate) -> str:
    """A layout in words."""
    return layout_text(*candidate.pair, candidate.layout)


def differences(first: Estimate, second: Estimate) -> int:
    """The number of decisions that differ, engine and model together counted once."""
    mine, theirs = settings(first.layout), settings(second.layout)
    differing = [key for key in mine if mine[key] != theirs[key]]
    return len(differing) + (first.pair != second.pair)


def searched(recipe: Recipe, cluster: Cluster | None) -> tuple[Recipe, Search]:
    """The recipe as it is trained, and all its layouts. Raises as `explore` does."""
    recipe = adopt_engine_config(recipe)
    if cluster is not None:
        recipe = placed_on(recipe, cluster)
    return recipe, explore(recipe, cluster)


def following(
    search: Search, trials: int, times: Mapping[str, float | None]
) -> Estimate | None:
    """The next layout to measure. None when enough were measured, or all.

    The best of every strategy comes first, as predictions rank variants of one strategy
    better than strategies. The rest of the budget goes to layouts that differ in one
    decision from the fastest so far.

    `times`: seconds per step of those that were tried, None for one that failed.
    """
    if len(times) >= trials:
        return None
    by_key = {key_of(settings_of(one)): one for one in search.fitting}
    left = {key: one for key, one in by_key.items() if key not in times}
    measured = {key: time for key, time in times.items() if time is not None and key in by_key}
    preferred = search.strategies(max(1, trials // 2))
    if measured:
        fastest = by_key[min(measured, key=measured.__getitem__)]
        preferred += [one for one in left.values() if differences(one, fastest) == 1]
    order = (*preferred, *left.values())
    return next((one for one in order if key_of(settings_of(one)) in left), None)


class LayoutStudy(Study):
    """Trials of layouts. A trial's value is the lower quartile of its seconds per step, because
    other work on the machine only adds time."""

    measures, whole = "step_time_s", False
    fatal = FAILURES  # another layout may need less memory

    def __init__(self, request: TuneRequest, search: Search, steps: int) -> None:
        """Raises PlanError if no layout fits. `steps`: measured steps of a trial."""
        self.search, self.end = search, WARM_UP_STEPS + steps
        if not search.fits:
            raise PlanError(
                "no layout of the recipe fits, so there is nothing to measure",
                fix=f"`dmt plan {request.path}` names what would fit",
            )
        super().__init__(request, kind="layouts")

    @cached_property
    def by_key(self) -> dict[str, Estimate]:
        """Every layout that fits, best predicted first."""
        return {key_of(settings_of(one)): one for one in self.search.fitting}

    def columns(self) -> Mapping[str, Callable[[TrialRecord], str]]:
        return {
            "layout": lambda one: named(self.estimate(one)),
            "measured": lambda one: seconds(one.value) if one.value else "-",
            "predicted": lambda one: seconds(self.estimate(one).step_s),
            "tokens/s": lambda one: f"{self.tokens_per_s(one):,.0f}" if one.value else "-",
        }

    def facts(self, record: TrialRecord) -> dict[str, Any]:
        estimate = self.estimate(record)
        return {
            "layout": named(estimate),
            "predicted_s": estimate.step_s,
            "tokens_per_s": self.tokens_per_s(record),
        }

    def tokens_per_s(self, record: TrialRecord) -> float | None:
        """Measured tokens per second on all devices."""
        one = self.request.recipe.training
        tokens = one.global_batch_size * one.rows_per_sample * one.sequence_length
        return tokens / record.value if record.value else None

    def estimate(self, record: TrialRecord) -> Estimate:
        """The planner's estimate of a trial's layout."""
        return self.by_key[key_of(record.settings)]

    def left(self) -> int:
        untried = self.by_key.keys() - {key_of(one.settings) for one in self.counted()}
        return min(len(untried), self.request.trials - len(self.counted()))

    def choose(self, trial: Any) -> dict[str, Any]:
        stated = trial.user_attrs.get("settings")
        if stated and key_of(stated) in self.by_key:
            return dict(stated)
        times = {
            key_of(one.settings): one.value if one.measured else None for one in self.counted()
        }
        candidate = following(self.search, self.request.trials, times)
        assert candidate is not None, "some are left"
        return settings_of(candidate)

    def overrides(self, settings: Mapping[str, Any]) -> list[str]:
        values = {**settings, **_WITHOUT}
        if self.request.recipe.schedule.name == "plateau":  # it needs validations
            values["evaluation.every_steps"] = _NEVER
        stated = (f"{key}={in_yaml(value)}" for key, value in values.items())
        return [*self.request.overrides, *stated]

    def values(self, followed: Followed) -> dict[int, float]:
        times = [float(line["step_time_s"]) for line in followed.metrics]
        return {
            end: sorted(times[WARM_UP_STEPS:end])[(end - WARM_UP_STEPS - 1) // 4]
            for end in range(WARM_UP_STEPS + 1, len(times) + 1)
        }
