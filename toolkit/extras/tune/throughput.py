"""`dmt tune --throughput`: layouts of the recipe measured for a few steps each.

Each result is a line of TUNE_DIR/results.jsonl, written when its trial has ended: a tuning that
was killed and is started again repeats the trial that ran, and no other.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter, ValidationError

from toolkit.backend import adopt_engine_config
from toolkit.errors import PlanError, Stopped
from toolkit.extras.tune.candidates import Candidates, key_of, settings_of
from toolkit.extras.tune.trial import (
    WARM_UP_STEPS,
    DeviceSlice,
    Ending,
    Followed,
    TrialResult,
    device_slices,
    hands_over,
    run_trial,
    trial_folder,
    wait_until_free,
)
from toolkit.hardware.cluster import Cluster
from toolkit.launcher import LAUNCHERS
from toolkit.plan.dimensions import layout_text
from toolkit.plan.planner import explore, placed_on
from toolkit.plan.search import Candidate, Search
from toolkit.recipe.dump import dump_recipe, in_yaml
from toolkit.recipe.schema import Recipe
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.system.atomic import write_atomically
from toolkit.text.redact import redact
from toolkit.text.units import seconds

HOPELESS = 1.3
"""How much slower than the fastest layout one may be that is measured to the end."""
_STEPS_TO_JUDGE = 3
"""Measured steps before one is given up: the fastest of them counts."""
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
    "launch.spares": 0,
}
"""Every trial trains and does nothing else."""
_NEVER = 1_000_000_000
_MOST_FAILURES = 4
"""Trials that fail for the same reason before any was measured: the next ones would, too."""


@dataclass(frozen=True, kw_only=True)
class Measurement(TrialResult):
    """A line of results.jsonl: one layout, and what its trial did; one that was given up as
    hopeless is `stopped`."""

    number: int
    """Of the trial, from 0."""
    layout: str
    settings: dict[str, Any]
    """What asks for the layout."""
    predicted_s: float
    """Seconds per step."""

    @property
    def measured(self) -> bool:
        """Whether it came to its end."""
        return self.ending == "done" and self.step_time_s is not None


_MEASUREMENT = TypeAdapter(Measurement)


@dataclass(frozen=True)
class Tuning:
    """A recipe whose layouts are measured."""

    path: Path
    """As it was typed."""
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
    candidates: Candidates = field(init=False)

    def __post_init__(self) -> None:
        """Raises PlanError if no layout fits, or the launcher hands its jobs over."""
        object.__setattr__(self, "candidates", Candidates(self.search, self.trials))
        if not self.search.fits:
            raise PlanError(
                "no layout of the recipe fits, so there is nothing to measure",
                fix=f"`dmt plan {self.path}` names what would fit",
            )
        nodes = self.recipe.cluster.nodes
        if nodes > 1 and self.started_locally:
            raise hands_over(self.recipe.launch.launcher, nodes)

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"

    def read(self) -> list[Measurement]:
        """The last result of each layout, next to what is predicted now; the cluster file may
        be another one than when it was measured. Raises PlanError for lines of another form."""
        try:
            lines = map(_MEASUREMENT.validate_python, jsonl.read(self.results))
            last = {key_of(result.settings): result for result in lines}
        except ValidationError as error:
            raise PlanError(
                f"{self.results} was not written by this version of DMT", fix="--dir OTHER"
            ) from error
        return [self._predicted_now(key, result) for key, result in last.items()]

    def _predicted_now(self, key: str, result: Measurement) -> Measurement:
        candidate = self.candidates.by_key.get(key)
        if candidate is None or candidate.step_s is None:
            return result
        return replace(result, predicted_s=candidate.step_s)

    def kept(self) -> list[Measurement]:
        """The results that are not repeated: none of a tuning that came to its end and has
        measured nothing, because what its trials failed for may have been mended since."""
        results = self.read()
        over = _all_fail(results) or self.candidates.following(_times(results)) is None
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

    @property
    def started_locally(self) -> bool:
        """Whether trials need another launcher than the recipe's, which hands its jobs over."""
        return not LAUNCHERS[self.recipe.launch.launcher].supervises(self.recipe.cluster.nodes)

    def settings(self, candidate: Candidate) -> list[str]:
        """The overrides of a trial."""
        values = {**settings_of(candidate), **_WITHOUT}
        if self.recipe.schedule.name == "plateau":  # it needs validations: behind all steps
            values["evaluation.every_steps"] = _NEVER
        if self.started_locally:
            values["launch.launcher"] = "local"
        return [*self.overrides, *(f"{key}={in_yaml(value)}" for key, value in values.items())]


def searched(recipe: Recipe, cluster: Cluster | None) -> tuple[Recipe, Search]:
    """The recipe as it is trained, and all its layouts. Raises as `explore` does."""
    recipe = adopt_engine_config(recipe)
    if cluster is not None:
        recipe = placed_on(recipe, cluster)
    return recipe, explore(recipe, cluster)


def measure(
    tuning: Tuning, on_step: Callable[[int, str], None] = lambda _, __: None
) -> Iterator[Measurement]:
    """Run the trials that are left, and yield each one's result when it is written.

    `on_step`: called with the trial's number and a line about it whenever it has trained a
    step. Raises as `Tuning.claim` and `device_slices` do, and Stopped when a signal to a trial
    has ended it: that is no result.
    """
    tuning.claim()
    devices = device_slices(tuning.recipe.cluster)[0]
    number = 1 + max((result.number for result in tuning.read()), default=-1)
    results = tuning.kept()
    while not _all_fail(results) and (
        candidate := tuning.candidates.following(_times(results))
    ):
        result = _measured(tuning, candidate, devices, number, fastest(results), on_step)
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


def calibration(tuning: Tuning, results: Sequence[Measurement]) -> float | None:
    """Predicted over measured seconds per step, the median of all layouts that still fit."""
    ratios = [
        result.predicted_s / result.step_time_s
        for result in results
        if result.measured
        and result.step_time_s
        and key_of(result.settings) in tuning.candidates.by_key
    ]
    return median(ratios) if ratios else None


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
    devices: DeviceSlice,
    number: int,
    best: Measurement | None,
    on_step: Callable[[int, str], None],
) -> Measurement:
    """Run the trial of a layout, in a new run directory."""
    layout = layout_text(*candidate.pair, candidate.layout)
    assert candidate.step_s is not None, "it fits"
    best_s = None if best is None else best.step_time_s
    judge = _Judge(tuning, best_s, lambda text: on_step(number, text))
    on_step(number, f"{layout}: starting")
    folder = trial_folder(tuning.folder, number)
    if folder.exists():  # of a tuning that was killed
        wait_until_free(folder)
        shutil.rmtree(folder)
    result = run_trial(
        tuning.path,
        tuning.settings(candidate),
        folder,
        devices,
        lambda followed: judge(layout, followed),
        hang_s=tuning.hang_s,
        options=tuning.options,
    )
    shutil.rmtree(RunDirectory(folder).checkpoints, ignore_errors=True)
    ending, reason = judge.ending(result)
    return Measurement(
        **vars(replace(result, ending=ending, reason=reason)),
        number=number,
        layout=layout,
        settings=settings_of(candidate),
        predicted_s=candidate.step_s,
    )


class _Judge:
    """Ends a trial that has trained enough steps, or that cannot become the fastest."""

    def __init__(
        self, tuning: Tuning, best_s: float | None, on_step: Callable[[str], None]
    ) -> None:
        self._enough = WARM_UP_STEPS + tuning.steps
        self._limit_s = None if best_s is None else best_s * HOPELESS
        self._best_s, self._on_step = best_s, on_step
        self._given_up = ""

    def __call__(self, layout: str, followed: Followed) -> bool:
        times = [float(line["step_time_s"]) for line in followed.metrics]
        if not times:
            return False
        self._on_step(f"{layout}: step {len(times)}, {seconds(times[-1])}")
        measured = times[WARM_UP_STEPS:]
        if len(times) >= self._enough:
            return True
        if self._limit_s is None or len(measured) < _STEPS_TO_JUDGE:
            return False
        if min(measured) > self._limit_s:
            assert self._best_s is not None
            slower = min(measured) / self._best_s
            self._given_up = f"at best {slower:.2f} × the fastest after {len(times)} steps"
        return bool(self._given_up)

    def ending(self, result: TrialResult) -> tuple[Ending, str]:
        """How the trial counts: one that was stopped after all its steps is done."""
        if result.ending == "stopped":
            return ("stopped", self._given_up) if self._given_up else ("done", "")
        if result.ending == "done" and result.step_time_s is None:
            return "failed", f"the run ends after {result.step} steps: too few to measure"
        return result.ending, result.reason
