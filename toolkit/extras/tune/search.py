"""`dmt tune --search`: hyperparameters searched by Optuna, each trial an ordinary run.

The study is TUNE_DIR/study.db (SQLite). A trial is recorded as running before it starts and
until its result is recorded; what a start of the search leaves running, the next one continues
in its run directory. So no trial is lost, and none is run twice.
"""

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol

from toolkit.errors import DmtError, PlanError, RecipeError, RunFailed
from toolkit.extras.tune.space import Choices, Parameter, Range, SearchSpace
from toolkit.extras.tune.trial import DeviceSlice, Followed, TrialResult, trial_folder
from toolkit.intake.layers import read_layers
from toolkit.intake.load import load_recipe
from toolkit.launchers.process import StopSignals
from toolkit.planning import plan_recipe
from toolkit.recipe import yaml_nodes
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import Recipe
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory
from toolkit.system.install import optional
from toolkit.text.terminal import tell

STUDY = "study.db"
REDUCTION = 2
"""Of the trials that reach a rung of ASHA, one in so many continues; a rung is at so many times
the steps of the one before (Li et al. 2020, arXiv:1810.05934)."""
_RUNGS = 2
"""At a quarter and a half of a run: earlier, the best settings are not ahead yet."""
_STARTUP = 5
"""Random points before TPE has a model."""
_MOST_FAILURES = 5
"""Trials that fail before any has succeeded: the next ones would, too."""
_MOST_REFUSALS = 20
"""Points that are refused before any is trained."""
_STORAGE_WAIT_S = 60.0
_POLL_S = 0.2


class TrialRunner(Protocol):
    """`run_trial` of a recipe."""

    def __call__(
        self,
        overrides: Sequence[str],
        folder: Path,
        devices: DeviceSlice,
        on_progress: Callable[[Followed], bool],
        *,
        interrupted: Callable[[], bool],
    ) -> TrialResult:
        """Run a trial in a folder, or continue the one that is there."""


@dataclass(frozen=True)
class SearchRequest:
    """What is searched, and how."""

    recipe: Path
    overrides: tuple[str, ...]
    """Of all trials."""
    space: SearchSpace
    folder: Path
    trials: int
    devices: Sequence[DeviceSlice]
    """One trial at a time on each."""
    seed: int = 0
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """`grid`: every choice of the only setting."""
    prune: bool = True
    """Whether ASHA ends trials that are worse than others at the same step."""


class HyperparameterSearch:
    """A study in its folder; `run` it, or only look at it."""

    def __init__(self, request: SearchRequest, run: TrialRunner) -> None:
        """Raises BackendUnavailable without Optuna, RecipeError for a recipe with a mistake,
        PlanError if the folder has another search."""
        self.request, self._run_trial = request, run
        self._optuna = optuna = optional("optuna", "tune", "dmt tune --search: optuna")
        self.recipe = load_recipe(request.recipe, request.overrides)
        self._lock = Lock()
        self._interrupted: Callable[[], bool] = lambda: False
        request.folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = self._open_study()
        self._unfinished: list[Any] = []
        self._failed_before: set[int] = set()
        """Trials that failed in an earlier start: others take their place."""

    def run(self) -> bool:
        """Run the trials that are left; False when a signal ended the search before its end.

        Raises DirectoryInUse while another process searches here, RunFailed when no trial
        succeeds.
        """
        slices = self.request.devices
        with (
            claimed(RunDirectory(self.request.folder)),
            StopSignals() as signals,
            ThreadPoolExecutor(len(slices)) as threads,
        ):
            running = self._optuna.trial.TrialState.RUNNING
            self._unfinished = [one for one in self._trials() if one.state == running]
            self._failed_before = {
                one.number for one in self._trials() if self._has_failed(one)
            }
            if self._failed_before:
                tell(
                    f"{len(self._failed_before)} trials failed before: others take their place"
                )
            failed = False
            self._interrupted = lambda: signals.stop_requested or failed
            workers = [threads.submit(self._work, devices) for devices in slices]
            while (left := wait(workers, _POLL_S, FIRST_EXCEPTION).not_done) and not failed:
                # Threads run the trials: only this one receives signals.
                failed = any(one.done() and one.exception() for one in workers)
            wait(left)
            for one in workers:
                one.result()
            return not any(not one.state.is_finished() for one in self._trials())

    def completed(self) -> list[Any]:
        """The trials that have come to their end, with the loss there as `value`."""
        complete = self._optuna.trial.TrialState.COMPLETE
        return [one for one in self._trials() if one.state == complete]

    def _work(self, devices: DeviceSlice) -> None:
        """Run one trial after the other on a share of the devices."""
        while not self._interrupted() and (trial := self._next_trial()) is not None:
            self._carry_out(trial, devices)

    def _next_trial(self) -> Any:
        """A trial that an earlier start left, or a new one; None when there are enough."""
        with self._lock:
            if self._unfinished:
                left = self._unfinished.pop(0)
                trial = self._optuna.trial.Trial(self.study, left._trial_id)
            elif self._count_tried() < self.request.trials:
                trial = self.study.ask()
            else:
                return None
            for one in self.request.space.parameters:
                suggest(trial, one)  # what a killed start had chosen stays
            return trial

    def _carry_out(self, trial: Any, devices: DeviceSlice) -> None:
        """Run a trial and record its result."""
        overrides = self.request.space.overrides(trial.params)
        refused = self._refusal(overrides)
        if refused is not None:
            self._record(trial, "refused", refused)
            return
        progress = _Progress(trial, self._lock, self.recipe, self._rung())
        if progress.is_hopeless():  # found before a kill
            self._record(trial, "stopped")
            return
        folder = trial_folder(self.request.folder, trial.number)
        chosen = [*self.request.overrides, *overrides]
        result = self._run_trial(
            chosen, folder, devices, progress, interrupted=self._interrupted
        )
        if result.ending != "interrupted":
            self._record(trial, result.ending, result.reason, result, progress.last)

    def _refusal(self, overrides: Sequence[str]) -> str | None:
        """Why this point of the space cannot be trained; None if it can."""
        try:
            planned = plan_recipe(
                load_recipe(self.request.recipe, [*self.request.overrides, *overrides])
            )
        except RecipeError as error:
            return str(error.problems[0])
        except DmtError as error:
            return error.message
        return None if planned.search.fits else "no layout fits into the devices' memory"

    def _record(
        self,
        trial: Any,
        ending: str,
        reason: str = "",
        result: TrialResult | None = None,
        loss: float | None = None,
    ) -> None:
        """Tell Optuna how a trial ended, and keep what was measured."""
        states = self._optuna.trial.TrialState
        if ending == "done" and loss is None:
            ending, reason = "failed", "it logged no loss"
        elif ending == "done" and not math.isfinite(loss or 0.0):
            ending, reason = "diverged", f"the loss is {loss}"
        # What TPE learns from: a pruned trial was a bad point, a failed one says nothing.
        state = {"done": states.COMPLETE, "failed": states.FAIL, "hung": states.FAIL}
        facts: dict[str, Any] = {"ending": ending, "reason": reason[:500]}
        if result is not None:
            facts |= {"steps": result.step, "seconds": round(result.seconds, 1)}
        with self._lock:
            trial.set_user_attr("result", facts)
            value = loss if ending == "done" else None
            self.study.tell(trial, value, state.get(ending, states.PRUNED))
            self._show(trial, ending, reason, loss)
            self._give_up_if_none_succeeds()

    def _show(self, trial: Any, ending: str, reason: str, loss: float | None) -> None:
        shown = "" if loss is None else f", loss {loss:.4f}"
        words = " ".join(self.request.space.overrides(trial.params))
        why = f": {reason}" if reason else ""
        text = {"done": "done", "stopped": "stopped, others are better at this step"}
        tell(f"trial {trial.number}  {text.get(ending, ending)}{shown}{why}  ({words})")

    def _give_up_if_none_succeeds(self) -> None:
        found = [one.user_attrs.get("result") for one in self._counted()]
        bad = [one for one in found if one and one["ending"] not in ("done", "stopped")]
        refused = sum(one["ending"] == "refused" for one in bad)
        few = len(bad) - refused < _MOST_FAILURES and refused < _MOST_REFUSALS
        if few or len(bad) < sum(one is not None for one in found):
            return
        last = f"{bad[-1]['ending']}: {bad[-1]['reason']}"
        if refused == len(bad):
            fix = "change the space, so that more of it suits the recipe"
            raise PlanError(f"all of {refused} points are {last}", fix=fix)
        raise RunFailed(
            f"none of {len(bad)} trials came to its end; the last {last}",
            fix=f"read launch.log in {self.request.folder}/trials; the same command then tries "
            "other points in the place of those that failed",
        )

    def _rung(self) -> int | None:
        """Steps of ASHA's first rung, a multiple of those between losses; None: no pruning."""
        return first_rung(self.recipe, self.request.space) if self.request.prune else None

    def _count_tried(self) -> int:
        """Trials but for those that the recipe's rules refused: these cost nothing."""
        waiting = self._optuna.trial.TrialState.WAITING  # of a grid
        begun = [one for one in self._counted() if one.state != waiting]
        results = [one.user_attrs.get("result", {}) for one in begun]
        return sum(one.get("ending") != "refused" for one in results)

    def _counted(self) -> list[Any]:
        return [one for one in self._trials() if one.number not in self._failed_before]

    def _has_failed(self, trial: Any) -> bool:
        """Whether it says nothing about its settings."""
        return bool(trial.state == self._optuna.trial.TrialState.FAIL)

    def _trials(self) -> list[Any]:
        found: list[Any] = self.study.get_trials(deepcopy=False)
        return found

    def _open_study(self) -> Any:
        """The study of the folder, which is that of this request."""
        optuna, request = self._optuna, self.request
        engine = {"connect_args": {"timeout": _STORAGE_WAIT_S}}
        address = f"sqlite:///{(request.folder / STUDY).absolute()}"
        storage = optuna.storages.RDBStorage(address, engine_kwargs=engine)
        study = optuna.create_study(
            study_name="search", storage=storage, direction="minimize", load_if_exists=True
        )
        stated = read_layers(request.recipe, request.overrides).root
        asked = {
            "recipe": in_yaml(yaml_nodes.to_data(stated)),
            "space": json.dumps([asdict(one) for one in request.space.parameters]),
        }
        for name, value in asked.items():
            if study.user_attrs.get(name, value) != value:
                raise PlanError(
                    f"{request.folder} has a search of another {name}",
                    fix="name another folder with --dir, or go back to the former one",
                )
            study.set_user_attr(name, value)
        # Another seed each time: the same one would suggest the same points again.
        seed = request.seed + len(study.get_trials(deepcopy=False))
        if request.sampler == "tpe":
            study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
        else:
            study.sampler = optuna.samplers.RandomSampler(seed=seed)
        if request.sampler == "grid":
            self._enqueue_choices(study)
        rung = self._rung()
        study.pruner = (
            optuna.pruners.NopPruner()
            if rung is None
            else optuna.pruners.SuccessiveHalvingPruner(rung, REDUCTION)
        )
        return study

    def _enqueue_choices(self, study: Any) -> None:
        """Of the only setting, those that no trial has or had without failing."""
        (one,) = self.request.space.parameters
        assert isinstance(one, Choices)
        kept = [trial for trial in study.get_trials() if not self._has_failed(trial)]
        points = [trial.params or trial.system_attrs.get("fixed_params", {}) for trial in kept]
        for value in one.values:
            if {one.key: value} not in points:
                study.enqueue_trial({one.key: value})


class _Progress:
    """Reports a trial's losses to the study, and says whether it is hopeless."""

    def __init__(self, trial: Any, lock: Lock, recipe: Recipe, rung: int | None) -> None:
        self._trial, self._lock = trial, lock
        self._validates = validates(recipe)
        self._end = recipe.total_steps() if rung is not None else 0
        frozen = trial.study._storage.get_trial(trial._trial_id)
        self._reported: dict[int, float] = dict(frozen.intermediate_values)

    @property
    def last(self) -> float | None:
        """The loss of the last step that has one."""
        return self._reported[max(self._reported)] if self._reported else None

    def __call__(self, followed: Followed) -> bool:
        """See `on_progress` of `run_trial`."""
        new = {
            step: loss
            for step, loss in losses(followed, self._validates).items()
            if step not in self._reported
        }
        hopeless = False
        with self._lock:
            for step, loss in sorted(new.items()):
                self._trial.report(loss, step)
                self._reported[step] = loss
                hopeless = hopeless or self._is_hopeless_at(step)
        return hopeless

    def is_hopeless(self) -> bool:
        with self._lock:
            return bool(self._reported) and self._is_hopeless_at(max(self._reported))

    def _is_hopeless_at(self, step: int) -> bool:
        """A trial that is at its end has its result: there is nothing left to save."""
        is_over = self._end is not None and step >= self._end
        return not is_over and bool(self._trial.should_prune())


def validates(recipe: Recipe) -> bool:
    """Whether runs of the recipe have a validation loss."""
    return recipe.data.validation is not None or recipe.data.validation_fraction > 0


def losses(followed: Followed, validation: bool) -> dict[int, float]:
    """The losses that a trial is judged by, by their steps: of validation, else of training."""
    lines = followed.metrics
    if validation:
        lines = [one for one in followed.events if one.get("kind") == "evaluation"]
    found: dict[int, float] = {}
    for line in lines:
        with suppress(KeyError, TypeError, ValueError):
            found[int(line["step"])] = float(line["loss"])
    return found


def first_rung(recipe: Recipe, space: SearchSpace) -> int | None:
    """Steps after which ASHA first ends trials: behind the warm-up of all of them, in which a
    high learning rate is still low. None if no trial has a loss there before its end."""
    steps = recipe.total_steps()
    section = recipe.evaluation if validates(recipe) else recipe.logging
    every = section.every_steps
    if every is None or steps is None:
        return None
    schedules = [recipe.schedule]
    for one in space.parameters:
        section_name, _, name = one.key.partition(".")
        if section_name == "schedule" and name in ("warmup_steps", "warmup_ratio"):
            values = [one.high] if isinstance(one, Range) else one.values
            numbers = [float(value) for value in values if value != "null"]
            schedules += [recipe.schedule.with_values({name: value}) for value in numbers]
    warmup = max(int(one.warmup(steps)) for one in schedules)
    rung = every * math.ceil(max(steps / REDUCTION**_RUNGS, warmup) / every)
    return rung if rung < steps else None


def suggest(trial: Any, one: Parameter) -> Any:
    """Let a trial have a value of a parameter; the one that it has, if any."""
    if isinstance(one, Choices):
        return trial.suggest_categorical(one.key, one.values)
    ask = trial.suggest_int if one.whole else trial.suggest_float
    step = one.step if one.step is not None or not one.whole else 1
    return ask(one.key, one.low, one.high, log=one.log, step=step)
