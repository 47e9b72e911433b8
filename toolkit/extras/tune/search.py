"""`dmt tune --search`: Optuna chooses the points, `dmt launch` trains them.

The study is DIR/study.db (SQLite). A trial is recorded as running before it starts and until
its result is recorded; what a killed search left running, the next one continues in its run
directory. So no trial is lost, and none runs twice.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from rich.text import Text

from toolkit.cli.output import Table
from toolkit.errors import DmtError, PlanError, RecipeError, RunFailed
from toolkit.extras.tune.space import Parameter, overrides_of
from toolkit.extras.tune.trial import DeviceSlice, Followed, run_trial, trial_folder
from toolkit.intake.layers import read_layers
from toolkit.intake.load import load_recipe
from toolkit.launchers.process import StopSignals
from toolkit.planning import plan_recipe
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import Recipe
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory
from toolkit.system.install import optional
from toolkit.text.terminal import tell

STUDY = "study.db"
_REDUCTION = 2
"""At a rung, one trial in so many continues (ASHA: Li et al. 2020, arXiv:1810.05934)."""
_MOST_FAILURES = 5
"""Trials that fail before any has succeeded."""
_MOST_REFUSALS = 20
"""Points that the recipe's rules refuse before any is trained."""
_SHOWN = 10
"""Rows of the printed table, the best trials."""
_POLL_S = 0.2


@dataclass(frozen=True)
class SearchRequest:
    """What is searched, and how."""

    recipe: Path
    overrides: Sequence[str]
    """Overrides of every trial."""
    space: Sequence[Parameter]
    folder: Path
    trials: int
    devices: Sequence[DeviceSlice]
    """One trial at a time runs on each."""
    hang_s: float
    seed: int = 0


@dataclass(frozen=True)
class Point:
    """One trial of a search."""

    number: int
    ending: str
    """As `TrialResult.ending`, or `refused`, `diverged` or `running`."""
    settings: dict[str, Any]
    loss: float | None
    """Loss at the last step that has one."""
    steps: int
    reason: str = ""


class HyperparameterSearch:
    """A study in its folder."""

    def __init__(self, request: SearchRequest) -> None:
        """Raises BackendUnavailable without Optuna, RecipeError for a recipe with a mistake,
        PlanError if the folder has another search."""
        self.request = request
        self._optuna = optional("optuna", "tune", "dmt tune --search: optuna")
        self._states = self._optuna.trial.TrialState
        self.recipe = load_recipe(request.recipe, request.overrides)
        self.rung = first_rung(self.recipe, request.space)
        self._lock = Lock()
        self._interrupted: Callable[[], bool] = lambda: False
        request.folder.mkdir(parents=True, exist_ok=True)
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        self._study = self._open_study()

    def run(self) -> bool:
        """Run the trials that are left. False when a signal ended the search early.

        Raises DirectoryInUse while another process searches here, RunFailed or PlanError when
        the first trials all fail.
        """
        devices = self.request.devices
        with (
            claimed(RunDirectory(self.request.folder)),
            StopSignals() as signals,
            ThreadPoolExecutor(len(devices)) as threads,
        ):
            trials = self._trials()
            self._left = [one for one in trials if one.state == self._states.RUNNING]
            self._failed_before = {
                one.number for one in trials if one.state == self._states.FAIL
            }
            failed = False
            self._interrupted = lambda: signals.stop_requested or failed
            workers = [threads.submit(self._work, one) for one in devices]
            while (left := wait(workers, _POLL_S, FIRST_EXCEPTION).not_done) and not failed:
                # Threads run the trials: only this one receives signals.
                failed = any(one.done() and one.exception() for one in workers)
            wait(left)
            for one in workers:
                one.result()
            return all(one.state.is_finished() for one in self._trials())

    def points(self) -> list[Point]:
        """Every trial, the best first: by loss those that came to their end, then the others
        by their steps."""
        points = [self._point(one) for one in self._trials()]

        def rank(one: Point) -> tuple[bool, int, float]:
            done = one.ending == "done"
            return (
                not done,
                0 if done else -one.steps,
                math.inf if one.loss is None else one.loss,
            )

        return sorted(points, key=rank)

    def best(self) -> Point | None:
        """The trial with the lowest loss at its end."""
        return next((one for one in self.points() if one.ending == "done"), None)

    def _point(self, one: Any) -> Point:
        facts = one.user_attrs.get("result", {"ending": "running", "reason": ""})
        step = one.last_step or 0
        loss = one.intermediate_values.get(step)
        return Point(one.number, facts["ending"], one.params, loss, step, facts["reason"])

    def _work(self, devices: DeviceSlice) -> None:
        """Run one trial after the other on a share of the devices."""
        while not self._interrupted() and (trial := self._next_trial()) is not None:
            self._carry_out(trial, devices)

    def _next_trial(self) -> Any:
        """A trial that an earlier start left, or a new one. None when there are enough."""
        with self._lock:
            if self._left:
                trial = self._optuna.trial.Trial(self._study, self._left.pop(0)._trial_id)
            elif self._count_tried() < self.request.trials:
                trial = self._study.ask()
            else:
                return None
            for one in self.request.space:
                one.suggest(trial)
            return trial

    def _carry_out(self, trial: Any, devices: DeviceSlice) -> None:
        """Run a trial and record its result."""
        overrides = [*self.request.overrides, *overrides_of(trial.params)]
        if refusal := self._refusal(overrides):
            return self._record(trial, "refused", refusal)
        losses_seen: dict[int, float] = dict(self._frozen(trial).intermediate_values)
        end = self.recipe.total_steps() or 0

        def is_hopeless(followed: Followed) -> bool:
            """A trial at its end has its result: there is nothing left to save."""
            hopeless = False
            with self._lock:
                for step, loss in sorted(losses(followed, validates(self.recipe)).items()):
                    if step not in losses_seen:
                        losses_seen[step] = loss
                        trial.report(loss, step)
                        hopeless |= step < end and bool(trial.should_prune())
            return hopeless

        folder = trial_folder(self.request.folder, trial.number)
        result = run_trial(
            self.request.recipe, overrides, folder, devices, is_hopeless,
            hang_s=self.request.hang_s, interrupted=self._interrupted,
        )  # fmt: skip
        if result.ending == "interrupted":
            return None
        ending, reason = result.ending, result.reason
        loss = losses_seen[max(losses_seen)] if losses_seen else None
        if ending == "done" and loss is None:
            ending, reason = "failed", "it logged no loss"
        return self._record(trial, ending, reason, loss)

    def _refusal(self, overrides: Sequence[str]) -> str:
        """Why a point of the space cannot be trained, empty if it can."""
        try:
            planned = plan_recipe(load_recipe(self.request.recipe, overrides))
        except RecipeError as error:
            return str(error.problems[0])
        except DmtError as error:
            return error.message
        return "" if planned.search.fits else "no layout fits into the devices' memory"

    def _record(self, trial: Any, ending: str, reason: str, loss: float | None = None) -> None:
        """Record how a trial ended. Checkpoints are kept for the best trial only.

        TPE learns from a pruned trial that its point is bad, from a failed one nothing.
        """
        value = loss if ending == "done" else None
        if ending == "done" and not math.isfinite(value or 0.0):
            ending, reason, value = "diverged", f"the loss is {loss}", None
        states = {"done": self._states.COMPLETE} | dict.fromkeys(
            ("failed", "hung"), self._states.FAIL
        )
        shown = "" if loss is None else f", loss {loss:.4f}"
        why = f": {reason}" if reason else ""
        words = " ".join(overrides_of(trial.params))
        with self._lock:
            former = self.best()
            trial.set_user_attr("result", {"ending": ending, "reason": reason[:500]})
            self._study.tell(trial, value, states.get(ending, self._states.PRUNED))
            best = self.best()
            for number in {trial.number} | ({former.number} if former else set()):
                if best is None or number != best.number:
                    folder = RunDirectory(trial_folder(self.request.folder, number))
                    for one in (folder.checkpoints, folder.export):
                        shutil.rmtree(one, ignore_errors=True)
            tell(f"trial {trial.number}  {ending}{shown}{why}  ({words})")
            self._give_up_if_none_succeeds()

    def _give_up_if_none_succeeds(self) -> None:
        points = [
            point
            for one in self._trials()
            if one.number not in self._failed_before
            and (point := self._point(one)).ending != "running"
        ]
        if any(one.ending in ("done", "stopped") for one in points):
            return
        refused = sum(one.ending == "refused" for one in points)
        last = f"{points[-1].ending}: {points[-1].reason}"
        if refused >= _MOST_REFUSALS and refused == len(points):
            fix = "change the space, so that more of it suits the recipe"
            raise PlanError(f"all of {refused} points are {last}", fix=fix)
        if len(points) - refused >= _MOST_FAILURES:
            logs = f"{self.request.folder}/trials/*/launch.log"
            raise RunFailed(
                f"none of {len(points)} trials came to its end; the last {last}",
                fix=f"read {logs}; the same command then tries other points",
            )

    def _count_tried(self) -> int:
        """Trials without those that cost nothing (refused) or failed in an earlier start."""
        return sum(
            one.number not in self._failed_before and self._point(one).ending != "refused"
            for one in self._trials()
        )

    def _frozen(self, trial: Any) -> Any:
        return self._trials()[trial.number]

    def _trials(self) -> list[Any]:
        trials: list[Any] = self._study.get_trials(deepcopy=False)
        return trials

    def _open_study(self) -> Any:
        optuna, request = self._optuna, self.request
        address = f"sqlite:///{(request.folder / STUDY).absolute()}"
        study = optuna.create_study(study_name="search", storage=address, load_if_exists=True)
        stated = read_layers(request.recipe, request.overrides).merged
        asked = {
            "recipe": in_yaml(stated.data),
            "space": json.dumps([asdict(one) for one in request.space]),
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


def first_rung(recipe: Recipe, space: Sequence[Parameter]) -> int | None:
    """Steps after which ASHA first ends trials: a quarter of the run, and after the warm-up of
    all trials, in which a high learning rate is still low. None if no trial has a loss there
    before its end."""
    steps = recipe.total_steps()
    every = (recipe.evaluation if validates(recipe) else recipe.logging).every_steps
    if every is None or steps is None:
        return None
    schedules = [recipe.schedule]
    for one in space:
        name = one.key.removeprefix("schedule.")
        if one.key in ("schedule.warmup_steps", "schedule.warmup_ratio"):
            values = [float(value) for value in one.choices if value != "null"] or [one.high]
            schedules += [recipe.schedule.with_values({name: value}) for value in values]
    warmup = max(int(one.warmup(steps)) for one in schedules)
    rung = every * math.ceil(max(steps / _REDUCTION**2, warmup) / every)
    return rung if rung < steps else None


def lines(search: HyperparameterSearch) -> Iterator[Text]:
    """How many trials ended how, and the best ones."""
    points, best = search.points(), search.best()
    endings = [one.ending for one in points]
    counts = ", ".join(f"{endings.count(one)} {one}" for one in dict.fromkeys(endings))
    yield Text(f"{len(points)} trials: {counts}", "bold")
    table: Table[Point] = Table(
        {
            "trial": lambda one: str(one.number),
            "ended": lambda one: one.ending,
            "steps": lambda one: f"{one.steps:,}",
            "loss": lambda one: "-" if one.loss is None else f"{one.loss:.4f}",
            "settings": lambda one: " ".join(overrides_of(one.settings)),
        },
        left=2,
    )
    yield from table.texts(
        points[:_SHOWN], lambda one: "bold" if one is points[0] and best else "", "  "
    )
