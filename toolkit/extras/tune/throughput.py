"""`dmt tune`: the planner's best layouts, measured for a few steps each.

Each result is a line of DIR/results.jsonl, written when its trial has ended: a tuning that was
killed and is started again repeats the trial that ran, and no other.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from toolkit.backend import adopt_engine_config
from toolkit.errors import PlanError, Stopped
from toolkit.extras.tune.trial import (
    WARM_UP_STEPS,
    Ending,
    Followed,
    TrialResult,
    check_waits,
    run_trial,
    trial_folder,
    wait_until_free,
)
from toolkit.hardware.cluster import Cluster
from toolkit.plan.dimensions import layout_text, settings
from toolkit.plan.planner import explore, placed_on
from toolkit.plan.search import Candidate, Search
from toolkit.recipe.dump import dump_recipe, in_yaml
from toolkit.recipe.schema import Recipe
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.system.atomic import write_atomically
from toolkit.text.redact import redact

HOPELESS = 1.3
"""A layout is given up when it is this many times slower than the fastest one."""
_STEPS_TO_JUDGE = 3
"""Measured steps before a layout is given up. The fastest of them counts."""
_WITHOUT = {
    "logging.every_steps": 1,
    "logging.wandb": None,
    "logging.tensorboard": False,
    "logging.mlflow": None,
    "logging.trackio": None,
    "evaluation.every_steps": None,
    "evaluation.early_stopping": None,
    "checkpoint.every_steps": None,
    "checkpoint.keep_best": None,
    "checkpoint.export": False,
    "parallel.balance": "none",
    "launch.max_restarts": 0,
    "launch.elastic": None,
}
"""Every trial trains and does nothing else."""
_NEVER = 1_000_000_000
_MOST_FAILURES = 4
"""Trials that fail for the same reason before any was measured."""


@dataclass(frozen=True, kw_only=True)
class Measurement(TrialResult):
    """A line of results.jsonl: one layout and its trial. `stopped` is one that was given up."""

    number: int
    """Number of the trial, from 0."""
    layout: str
    settings: dict[str, Any]
    """Settings of a recipe that ask for the layout."""
    predicted_s: float
    """Seconds per step."""
    tokens_per_s: float | None
    """Of the global batch, all ranks together."""

    @property
    def measured(self) -> bool:
        """Whether the trial came to its end."""
        return self.ending == "done" and self.step_time_s is not None


_MEASUREMENT = TypeAdapter(Measurement)


def settings_of(candidate: Candidate) -> dict[str, Any]:
    """The settings of a recipe that ask for this layout, by dotted name."""
    engine, model = candidate.pair
    values = settings(candidate.layout) | {"parallel.engine": engine, "parallel.model": model}
    return {key: [*one] if isinstance(one, tuple) else one for key, one in values.items()}


def key_of(values: Mapping[str, Any]) -> str:
    """The key of a layout's settings, the same after they were written and read as JSON."""
    return json.dumps(values, sort_keys=True)


def differences(first: Candidate, second: Candidate) -> int:
    """The number of decisions that differ, engine and model together counted once."""
    mine, theirs = settings(first.layout), settings(second.layout)
    differing = [key for key in mine if mine[key] != theirs[key]]
    return len(differing) + (first.pair != second.pair)


@dataclass(frozen=True)
class Tuning:
    """A recipe whose layouts are measured."""

    path: Path
    """Recipe as it was typed."""
    overrides: Sequence[str]
    recipe: Recipe
    search: Search
    folder: Path
    trials: int
    steps: int
    """Measured steps of a trial."""
    hang_s: float
    options: Sequence[str] = ()
    """More options of `dmt launch`."""

    def __post_init__(self) -> None:
        """Raises PlanError if no layout fits, or the launcher hands its jobs over."""
        if not self.search.fits:
            raise PlanError(
                "no layout of the recipe fits, so there is nothing to measure",
                fix=f"`dmt plan {self.path}` names what would fit",
            )
        check_waits(self.recipe)

    @cached_property
    def by_key(self) -> dict[str, Candidate]:
        """Every layout that fits, best predicted first."""
        return {key_of(settings_of(one)): one for one in self.search.fitting}

    def following(self, times: Mapping[str, float | None]) -> Candidate | None:
        """The next layout to measure. None when enough were measured, or all.

        The best of every strategy comes first, as predictions rank variants of one strategy
        better than strategies. The rest of the budget goes to layouts that differ in one
        decision from the fastest so far.

        `times`: seconds per step of those that were tried, None for one that failed.
        """
        if len(times) >= self.trials:
            return None
        left = {key: one for key, one in self.by_key.items() if key not in times}
        measured = {
            key: time for key, time in times.items() if time is not None and key in self.by_key
        }
        preferred = self.search.strategies(max(1, self.trials // 2))
        if measured:
            fastest = self.by_key[min(measured, key=measured.__getitem__)]
            preferred += [one for one in left.values() if differences(one, fastest) == 1]
        order = (*preferred, *left.values())
        return next((one for one in order if key_of(settings_of(one)) in left), None)

    def expected(self) -> list[Candidate]:
        """The layouts that are measured if every prediction is right, in order."""
        times: dict[str, float | None] = {}
        while candidate := self.following(times):
            times[key_of(settings_of(candidate))] = candidate.step_s
        return [self.by_key[key] for key in times]

    @property
    def planned(self) -> str:
        """The planner's choice."""
        return layout_text(*self.search.best.pair, self.search.best.layout)

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"

    def read(self) -> list[Measurement]:
        """The last result of each layout. Raises PlanError for lines of another form."""
        try:
            lines = map(_MEASUREMENT.validate_python, jsonl.read(self.results))
            return [*{key_of(result.settings): result for result in lines}.values()]
        except ValidationError as error:
            raise PlanError(
                f"{self.results} was not written by this version of DMT", fix="--dir OTHER"
            ) from error

    def kept(self) -> list[Measurement]:
        """The results that are not repeated: none of a tuning that ended without a measured
        layout, as the reason may have been removed since."""
        results = self.read()
        over = _all_fail(results) or self.following(_times(results)) is None
        return [] if over and fastest(results) is None else results

    def claim(self) -> None:
        """Make the folder this tuning's. Raises PlanError if it is another recipe's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file, text = RunDirectory(self.folder).recipe, redact(dump_recipe(self.recipe))
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise PlanError(
                f"{self.folder} has the results of another recipe or of other settings",
                fix="--dir OTHER, or remove it",
            )
        write_atomically(file, text)

    def overrides_of(self, candidate: Candidate) -> list[str]:
        """The overrides of a trial."""
        values = {**settings_of(candidate), **_WITHOUT}
        if self.recipe.schedule.name == "plateau":  # it needs validations: behind all steps
            values["evaluation.every_steps"] = _NEVER
        return [*self.overrides, *(f"{key}={in_yaml(value)}" for key, value in values.items())]


def searched(recipe: Recipe, cluster: Cluster | None) -> tuple[Recipe, Search]:
    """The recipe as it is trained, and all its layouts. Raises as `explore` does."""
    recipe = adopt_engine_config(recipe)
    if cluster is not None:
        recipe = placed_on(recipe, cluster)
    return recipe, explore(recipe, cluster)


def measure(tuning: Tuning) -> Iterator[Measurement]:
    """Run the trials that are left, and yield each result when it is written.

    Raises as `Tuning.claim` does, and Stopped when a signal to a trial has
    ended it: that is no result.
    """
    tuning.claim()
    number = 1 + max((result.number for result in tuning.read()), default=-1)
    results = tuning.kept()
    while not _all_fail(results) and (candidate := tuning.following(_times(results))):
        result = _measured(tuning, candidate, number, fastest(results))
        if result.ending == "interrupted":
            raise Stopped(
                f"a signal ended trial {number}", fix="start the same command to continue"
            )
        jsonl.append(tuning.results, asdict(result))
        number += 1
        results.append(result)
        yield result


def fastest(results: Sequence[Measurement]) -> Measurement | None:
    """The layout with the shortest measured step."""
    measured = [result for result in results if result.measured]
    return min(measured, key=lambda result: result.step_time_s or 0.0, default=None)


def _all_fail(results: Sequence[Measurement]) -> bool:
    """Whether nothing was measured, and the last trials failed for one reason."""
    last = {(result.ending, result.reason) for result in results[-_MOST_FAILURES:]}
    failing = len(results) >= _MOST_FAILURES and len(last) == 1
    return failing and results[-1].ending in ("failed", "hung") and fastest(results) is None


def _times(results: Sequence[Measurement]) -> dict[str, float | None]:
    return {
        key_of(result.settings): result.step_time_s if result.measured else None
        for result in results
    }


def _measured(
    tuning: Tuning,
    candidate: Candidate,
    number: int,
    best: Measurement | None,
) -> Measurement:
    """Run the trial of a layout, in a new run directory."""
    assert candidate.step_s is not None, "it fits"
    judge = Judge(tuning.steps, best.step_time_s if best else None)
    folder = trial_folder(tuning.folder, number)
    if folder.exists():  # of a tuning that was killed
        wait_until_free(folder)
        shutil.rmtree(folder)
    result = run_trial(
        tuning.path,
        tuning.overrides_of(candidate),
        folder,
        judge,
        hang_s=tuning.hang_s,
        options=tuning.options,
    )
    shutil.rmtree(RunDirectory(folder).checkpoints, ignore_errors=True)
    ending, reason = judge.ending(result)
    training = tuning.recipe.training
    tokens = training.global_batch_size * training.rows_per_sample * training.sequence_length
    return Measurement(
        **vars(replace(result, ending=ending, reason=reason)),
        number=number,
        layout=layout_text(*candidate.pair, candidate.layout),
        settings=settings_of(candidate),
        predicted_s=candidate.step_s,
        tokens_per_s=tokens / result.step_time_s if result.step_time_s else None,
    )


class Judge:
    """Ends a trial that has trained enough steps, or that cannot become the fastest."""

    def __init__(self, steps: int, best_s: float | None) -> None:
        self._enough, self._best_s = WARM_UP_STEPS + steps, best_s
        self._given_up = ""

    def __call__(self, followed: Followed) -> bool:
        """Whether the trial ends here."""
        times = [float(line["step_time_s"]) for line in followed.metrics]
        measured = times[WARM_UP_STEPS:]
        if len(times) >= self._enough:
            return True
        if self._best_s is None or len(measured) < _STEPS_TO_JUDGE:
            return False
        if (slower := min(measured) / self._best_s) > HOPELESS:
            self._given_up = f"at best {slower:.2f} × the fastest after {len(times)} steps"
        return bool(self._given_up)

    def ending(self, result: TrialResult) -> tuple[Ending, str]:
        """How the trial counts: one that was stopped after all its steps is done."""
        if result.ending == "stopped":
            return ("stopped", self._given_up) if self._given_up else ("done", "")
        if result.ending == "done" and result.step_time_s is None:
            return "failed", f"the run ends after {result.step} steps: too few to measure"
        return result.ending, result.reason
