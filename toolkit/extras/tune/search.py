"""`dmt tune --search`: Optuna chooses the points, `dmt launch` trains them.

The study is DIR/study.db (SQLite), in which several processes may search. A running trial has
Optuna's heartbeat: one that a kill left is failed, and retried with the same point in the same
run directory, which continues. So no trial is lost, and none runs twice.
"""

import math
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import DmtError, PlanError, RecipeError, RunFailed
from toolkit.extras.tune.space import Space, overrides_of, suggest
from toolkit.extras.tune.trial import Followed, run_trial, trial_folder
from toolkit.intake.layers import read_layers
from toolkit.intake.load import load_recipe
from toolkit.launchers.process import StopSignals
from toolkit.planning import plan_recipe
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import Recipe
from toolkit.run.directory import RunDirectory
from toolkit.system.install import optional
from toolkit.text.terminal import tell

HEARTBEAT_S, GRACE_S = 10, 60
"""How often a running trial gives a sign of life, and after which silence it was killed."""
_REDUCTION = 2
"""At a rung, one trial in so many continues (ASHA: Li et al. 2020, arXiv:1810.05934)."""
_MOST_FAILURES, _MOST_REFUSALS = 5, 20
"""Trials that fail, and points that the recipe's rules refuse, before any has succeeded."""
_POLL_S = 0.5


@dataclass(frozen=True)
class SearchRequest:
    """What is searched, and how."""

    recipe: Path
    overrides: Sequence[str]
    """Overrides of every trial."""
    space: Space
    folder: Path
    trials: int
    hang_s: float
    seed: int = 0


@dataclass(frozen=True)
class Point:
    """One trial of a search."""

    number: int
    """Of its run directory: that of its first start."""
    ending: str
    """As `TrialResult.ending`, or `refused` or `diverged`; a `stopped` trial was pruned."""
    settings: dict[str, Any]
    loss: float | None
    """Loss at the last step that has one."""
    steps: int
    reason: str = ""


class _Interrupted(Exception):
    """A signal ended the trial, which saved."""


class _SaysNothing(Exception):
    """A trial that failed says nothing about its point."""


class HyperparameterSearch:
    """A study in its folder."""

    def __init__(self, request: SearchRequest) -> None:
        """Raises BackendUnavailable without Optuna, RecipeError for a recipe with a mistake,
        PlanError if the folder has another search."""
        self.request = request
        self._optuna = optional("optuna", "tune", "dmt tune --search: optuna")
        self.recipe = load_recipe(request.recipe, request.overrides)
        self.rung = first_rung(self.recipe, request.space)
        self._interrupted: Callable[[], bool] = lambda: False
        request.folder.mkdir(parents=True, exist_ok=True)
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        with warnings.catch_warnings():  # heartbeats are experimental
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            self._study = self._open_study()
        self._before = {one.number for one in self.points() if one.ending in ("failed", "hung")}

    def run(self) -> bool:
        """Run the trials that are left. False when a signal ended the search early.

        Raises RunFailed when the first trials all fail.
        """
        running = self._optuna.trial.TrialState.RUNNING
        with StopSignals() as signals:
            self._interrupted = lambda: bool(signals.stop_requested)
            while (left := self._left()) > 0:
                if signals.stop_requested:
                    return False
                if left <= len(self._study.get_trials(states=(running,))):
                    self._wait_for_others()
                    continue
                try:
                    self._study.optimize(self._objective, 1, catch=(_SaysNothing,))
                except _Interrupted:
                    return False
                self._give_up_if_none_succeeds()
        return True

    def points(self) -> list[Point]:
        """Every trial that ended, the best first: by loss those that came to their end, then
        the others by their steps."""

        def rank(one: Point) -> tuple[bool, int, float]:
            done = one.ending == "done"
            return not done, 0 if done else -one.steps, one.loss or math.inf

        trials = self._study.get_trials(deepcopy=False)
        ended = [
            one for one in trials if "ending" in one.user_attrs and one.state.is_finished()
        ]
        return sorted(map(self._point, ended), key=rank)

    def best(self) -> Point | None:
        """The trial with the lowest loss at its end."""
        return next((one for one in self.points() if one.ending == "done"), None)

    def _point(self, trial: Any) -> Point:
        facts, step = trial.user_attrs, trial.last_step or 0
        loss = trial.intermediate_values.get(step)
        number = self._folder_number(trial)
        return Point(number, facts["ending"], trial.params, loss, step, facts["reason"])

    def _folder_number(self, trial: Any) -> int:
        return int(trial.user_attrs.get("folder", trial.number))

    def _retry(self, study: Any, trial: Any) -> None:
        """Enqueue the point of a trial that was killed or interrupted."""
        study.enqueue_trial(trial.params, user_attrs={"folder": self._folder_number(trial)})

    def _left(self) -> int:
        """Trials that have no end yet, without points that cost nothing (refused) or said
        nothing (failed) in an earlier start."""
        ended = [one for one in self.points() if one.ending != "refused"]
        return self.request.trials - sum(one.number not in self._before for one in ended)

    def _wait_for_others(self) -> None:
        """Other processes run the last trials, or were killed."""
        time.sleep(_POLL_S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            self._optuna.storages.fail_stale_trials(self._study)

    def _objective(self, trial: Any) -> float:
        """Run a trial; its loss. TPE learns from a pruned trial that its point is bad, from a
        failed one nothing."""
        for key, distribution in self.request.space.items():
            suggest(trial, key, distribution)
        ending, reason, loss = self._trained(trial)
        frozen = self._study.get_trials(deepcopy=False)[trial.number]
        if ending == "interrupted":
            self._retry(self._study, frozen)
            raise _Interrupted
        former = self.best()
        trial.set_user_attr("reason", reason[:500])
        trial.set_user_attr("ending", ending)
        number = self._folder_number(frozen)
        self._drop_checkpoints(number, former, loss if ending == "done" else None)
        shown = "" if loss is None else f", loss {loss:.4f}"
        why = f": {reason}" if reason else ""
        words = " ".join(overrides_of(trial.params))
        tell(f"trial {number}  {ending}{shown}{why}  ({words})")
        if ending in ("failed", "hung"):
            raise _SaysNothing
        if ending != "done" or loss is None:
            raise self._optuna.TrialPruned
        return loss

    def _trained(self, trial: Any) -> tuple[str, str, float | None]:
        """Train a point: how it ended, why, and the last loss."""
        overrides = [*self.request.overrides, *overrides_of(trial.params)]
        if refusal := self._refusal(overrides):
            return "refused", refusal, None
        frozen = self._study.get_trials(deepcopy=False)[trial.number]
        seen: dict[int, float] = dict(frozen.intermediate_values)
        end = self.recipe.total_steps() or 0

        def is_hopeless(followed: Followed) -> bool:
            """A trial at its end has its result: there is nothing left to save."""
            hopeless = False
            for step, loss in sorted(losses(followed, validates(self.recipe)).items()):
                if step not in seen:
                    seen[step] = loss
                    trial.report(loss, step)
                    hopeless |= step < end and bool(trial.should_prune())
            return hopeless

        folder = trial_folder(self.request.folder, self._folder_number(frozen))
        result = run_trial(
            self.request.recipe, overrides, folder, is_hopeless,
            hang_s=self.request.hang_s, interrupted=self._interrupted,
        )  # fmt: skip
        loss = seen[max(seen)] if seen else None
        if result.ending == "done" and loss is None:
            return "failed", "it logged no loss", None
        if result.ending == "done" and not math.isfinite(loss or 0.0):
            return "diverged", f"the loss is {loss}", loss
        return result.ending, result.reason, loss

    def _refusal(self, overrides: Sequence[str]) -> str:
        """Why a point of the space cannot be trained, empty if it can."""
        try:
            planned = plan_recipe(load_recipe(self.request.recipe, overrides))
        except RecipeError as error:
            return str(error.problems[0])
        except DmtError as error:
            return error.message
        return "" if planned.search.fits else "no layout fits into the devices' memory"

    def _drop_checkpoints(self, number: int, former: Point | None, loss: float | None) -> None:
        """Checkpoints are kept for the best trial only."""
        is_best = loss is not None and (former is None or loss < (former.loss or math.inf))
        dropped = number if former is None or not is_best else former.number
        if is_best and former is None:
            return
        folder = RunDirectory(trial_folder(self.request.folder, dropped))
        for one in (folder.checkpoints, folder.export):
            shutil.rmtree(one, ignore_errors=True)

    def _give_up_if_none_succeeds(self) -> None:
        points = [one for one in self.points() if one.number not in self._before]
        failures = [one for one in points if one.ending != "refused"]
        if any(one.ending in ("done", "stopped") for one in points):
            return
        if len(failures) >= _MOST_FAILURES or len(points) >= _MOST_REFUSALS:
            last = (failures or points)[-1]
            logs = f"{self.request.folder}/trials/*/launch.log"
            raise RunFailed(
                f"none of {len(points)} trials came to its end; one {last.ending}: "
                f"{last.reason}",
                fix=f"change the space, or read {logs}; the same command tries other points",
            )

    def _open_study(self) -> Any:
        optuna, request = self._optuna, self.request
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{(request.folder / 'study.db').absolute()}",
            heartbeat_interval=HEARTBEAT_S,
            grace_period=GRACE_S,
            heartbeat_stale_trial_callback=self._retry,
        )
        study = optuna.create_study(study_name="search", storage=storage, load_if_exists=True)
        stated = read_layers(request.recipe, request.overrides).merged
        asked = {
            "recipe": in_yaml(stated.data),
            "space": str({key: str(one) for key, one in request.space.items()}),
        }
        for name, value in asked.items():
            if study.user_attrs.get(name, value) != value:
                raise PlanError(
                    f"{request.folder} has a search of another {name}",
                    fix="name another folder with --dir",
                )
            study.set_user_attr(name, value)
        # The same seed would suggest the same points again.
        seed = request.seed + len(study.get_trials(deepcopy=False))
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
        study.pruner = optuna.pruners.NopPruner()
        if self.rung is not None:
            study.pruner = optuna.pruners.SuccessiveHalvingPruner(self.rung, _REDUCTION)
        return study


def validates(recipe: Recipe) -> bool:
    """Whether runs of the recipe have a validation loss."""
    return recipe.data.validation is not None or recipe.data.validation_fraction > 0


def losses(followed: Followed, validation: bool) -> dict[int, float]:
    """Losses by their steps: of validation, else of training."""
    evaluations = [one for one in followed.events if one.get("kind") == "evaluation"]
    by_step: dict[int, float] = {}
    for line in evaluations if validation else followed.metrics:
        with suppress(KeyError, TypeError, ValueError):
            by_step[int(line["step"])] = float(line["loss"])
    return by_step


def first_rung(recipe: Recipe, space: Space) -> int | None:
    """Steps after which ASHA first ends trials: a quarter of the run, and after the warm-up of
    all trials, in which a high learning rate is still low. None if no trial has a loss there
    before its end."""
    steps = recipe.total_steps()
    every = (recipe.evaluation if validates(recipe) else recipe.logging).every_steps
    if every is None or steps is None:
        return None
    schedules = [recipe.schedule]
    for key in ("schedule.warmup_steps", "schedule.warmup_ratio"):
        for value in _most(space[key]) if key in space else ():
            changed = {key.removeprefix("schedule."): value}
            schedules.append(recipe.schedule.with_values(changed))
    warmup = max(int(one.warmup(steps)) for one in schedules)
    rung = every * math.ceil(max(steps / _REDUCTION**2, warmup) / every)
    return rung if rung < steps else None


def _most(distribution: Any) -> list[float]:
    """The largest value of a range, or every choice that is a number."""
    choices = getattr(distribution, "choices", None)
    if choices is None:
        return [distribution.high]
    return [float(one) for one in choices if one != "null"]
