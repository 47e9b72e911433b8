"""The trials of a tuning, recorded in an Optuna study.

The study is DIR/study.db (SQLite). A trial that a kill or a signal ended is started again with
the same settings in the same run directory, so no trial is lost or counted twice. A subclass
says which trials there are and what they measure.
"""

import fcntl
import json
import math
import shutil
import sqlite3
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

from toolkit import __version__
from toolkit.errors import DmtError, PlanError, RunFailed
from toolkit.extras.tune.trial import Ending, Followed, run_trial, wait_until_free
from toolkit.launchers.process import StopSignals
from toolkit.recipe.dump import dump_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.directory import RunDirectory
from toolkit.system.install import optional
from toolkit.text.redact import redact

HEARTBEAT_S, GRACE_S = 10, 60
"""Seconds between a running trial's signs of life. After this silence it counts as killed."""
_MOST_FAILURES, _MOST_REFUSALS = 5, 20
"""When a tuning is given up that has measured nothing: after so many trials of `Study.fatal`
endings, or after so many points that the recipe's rules refuse."""
FAILURES = ("failed", "hung")
"""Endings that say nothing about the settings of the trial."""
_POLL_S = 0.5

RecordedEnding = Ending | Literal["diverged"]
"""`stopped` is a trial that was given up because it cannot become the best."""


@dataclass(frozen=True)
class TuneRequest:
    """What is tuned, and where."""

    path: Path
    """Recipe as it was typed."""
    overrides: Sequence[str]
    """Overrides of every trial."""
    recipe: Recipe
    folder: Path
    trials: int
    hang_s: float
    options: Sequence[str] = ()
    """More options of `dmt launch`."""


@dataclass(frozen=True)
class TrialRecord:
    """One trial that ended."""

    number: int
    """Number of its folder, from 0."""
    settings: dict[str, Any]
    ending: RecordedEnding
    reason: str = ""
    steps: int = 0
    value: float | None = None
    """What the study measures: the loss at the end, or seconds per step."""
    memory_gib: float | None = None

    @property
    def measured(self) -> bool:
        """Whether the trial came to its end."""
        return self.ending == "done"


_RECORD = TypeAdapter(TrialRecord)


class _Interrupted(Exception):
    """A signal ended the trial."""


class Study(ABC):
    """The trials in a folder. The lowest value is the best."""

    measures: ClassVar[str]
    """Name of the value in `--json`."""
    whole: ClassVar[bool]
    """Whether trials are runs to their own end: a killed one continues, and several processes
    may run trials at once. Otherwise a trial ends at step `end`, a killed one is repeated from
    its first step, and one process has the folder."""
    fatal: ClassVar[Sequence[str]]
    """Endings that give the tuning up if many come before the first result."""
    end: int
    """Step at which a trial has its result."""

    def __init__(self, request: TuneRequest, **identity: str) -> None:
        """`identity` names what all trials have in common besides the recipe.

        Raises as `make_folder` and `_storage` do. Raises PlanError if the folder has trials of
        another recipe, space or version.
        """
        self.request = request
        make_folder(request.folder)
        self.optuna = optional("optuna", "tune", "dmt tune: optuna")
        self.failure = "no trial came to its end"  # why there is no best one after `run`
        self._running = (self.optuna.trial.TrialState.RUNNING,)
        self._interrupted: Callable[[], bool] = lambda: False
        self._on_end: Callable[[TrialRecord], None] = lambda _: None
        recipe = redact(dump_recipe(request.recipe))
        self._identity = {**identity, "recipe": recipe, "version": __version__}
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        with self._storage():
            self._open()
        self._before = set()
        if self.best() is None:  # what made them fail may have been removed since
            self._before = {one.number for one in self.records() if one.ending != "stopped"}

    @abstractmethod
    def left(self) -> int:
        """How many trials are left to run."""

    @abstractmethod
    def choose(self, trial: Any) -> dict[str, Any]:
        """The settings for an Optuna trial that starts. A trial that is retried keeps its own
        (user attribute `settings`)."""

    @abstractmethod
    def overrides(self, settings: Mapping[str, Any]) -> list[str]:
        """The overrides of the trial with these settings."""

    @abstractmethod
    def values(self, followed: Followed) -> dict[int, float]:
        """The values that a running trial has measured, by step."""

    @abstractmethod
    def columns(self) -> Mapping[str, Callable[[TrialRecord], str]]:
        """The columns printed for each trial."""

    def facts(self, record: TrialRecord) -> dict[str, Any]:  # noqa: ARG002 - of a subclass
        """More facts about a trial for `--json`."""
        return {}

    def run(self, on_end: Callable[[TrialRecord], None] = lambda _: None) -> bool:
        """Run the trials that are left, and call `on_end` with each recorded one. Returns False
        if a signal ended it early. `failure` then says why the tuning was given up, if it was.
        Raises as `_storage` does."""
        self._on_end = on_end
        with StopSignals() as signals, self._storage():
            self._interrupted = lambda: bool(signals.stop_requested)
            while (left := self.left()) > 0 and not self._none_succeeds():
                if signals.stop_requested:
                    return False
                if left <= len(self.study.get_trials(states=self._running)):
                    time.sleep(_POLL_S)  # others run the last trials, or were killed
                    self.optuna.storages.fail_stale_trials(self.study)
                    continue
                try:
                    self.study.optimize(self._objective, 1, catch=(RunFailed,))
                except _Interrupted:
                    return False
                self._drop_checkpoints()
        return True

    def records(self) -> list[TrialRecord]:
        """The newest finished trial of each combination of settings."""
        ended = [
            _RECORD.validate_python(one.user_attrs["record"])
            for one in self.study.get_trials(deepcopy=False)
            if "record" in one.user_attrs and one.state.is_finished()
        ]
        return [*{json.dumps(one.settings, sort_keys=True): one for one in ended}.values()]

    def counted(self) -> list[TrialRecord]:
        """The trials that this start does not repeat."""
        return [one for one in self.records() if one.number not in self._before]

    def ranked(self) -> list[TrialRecord]:
        """Trials that came to their end, best first. Then the others, most steps first."""

        def rank(one: TrialRecord) -> tuple[bool, int, float]:
            steps = 0 if one.measured else -one.steps
            return not one.measured, steps, math.inf if one.value is None else one.value

        return sorted(self.records(), key=rank)

    def best(self) -> TrialRecord | None:
        """The trial with the lowest value at its end."""
        return next((one for one in self.ranked() if one.measured), None)

    def _objective(self, trial: Any) -> float:
        """Run a trial and return its value. TPE learns from a pruned trial that its point is
        bad. From a failed one it learns nothing."""
        settings = self.choose(trial)
        trial.set_user_attr("settings", settings)
        record = self._trained(trial, settings)
        if record.ending == "interrupted":
            _retry(self.study, trial)
            raise _Interrupted
        trial.set_user_attr("record", asdict(record))
        self._on_end(record)
        if record.ending in FAILURES:
            raise RunFailed(record.reason)
        if not record.measured or record.value is None:
            raise self.optuna.TrialPruned
        return record.value

    def _trained(self, trial: Any, settings: dict[str, Any]) -> TrialRecord:
        """Run a trial, or continue it."""
        number, is_hopeless = _number(trial), False
        folder, seen = trial_folder(self.request.folder, number), dict[int, float]()

        def is_over(followed: Followed) -> bool:
            nonlocal is_hopeless
            for step, value in sorted(self.values(followed).items()):
                if step not in seen:
                    seen[step] = value
                    trial.report(value, step)
                    is_hopeless |= step < self.end and bool(trial.should_prune())
            return is_hopeless or (not self.whole and max(seen, default=0) >= self.end)

        if not self.whole and folder.exists():  # of a tuning that was killed
            wait_until_free(folder)
            shutil.rmtree(folder)
        request = self.request
        result = run_trial(
            request.path, self.overrides(settings), folder, is_over,
            hang_s=request.hang_s, interrupted=self._interrupted, options=request.options,
        )  # fmt: skip
        steps = max(seen, default=0)
        ending: RecordedEnding = result.ending
        reason, value = result.reason, seen.get(steps)
        if ending == "stopped" and not is_hopeless:
            ending = "done"
        if ending == "done" and value is None:
            ending, reason = "failed", "it ended with nothing measured"
        elif ending in ("done", "stopped") and not math.isfinite(value or 0.0):
            ending, reason = "diverged", f"{self.measures} is {value}"
        return TrialRecord(number, settings, ending, reason, steps, value, result.memory_gib)

    def _drop_checkpoints(self) -> None:
        """Delete checkpoints of all but the best trial. Other processes may have ended trials,
        too."""
        best = self.best()
        for one in self.records():
            folder = RunDirectory(trial_folder(self.request.folder, one.number))
            for path in (folder.checkpoints, folder.export) if one != best else ():
                shutil.rmtree(path, ignore_errors=True)

    def _none_succeeds(self) -> bool:
        """Whether the tuning is given up. `failure` says why."""
        records = self.counted()
        if any(one.ending in ("done", "stopped") for one in records):
            return False
        refused = [one for one in records if one.ending == "refused"]
        failures = [one for one in records if one.ending in self.fatal]
        if len(failures) < _MOST_FAILURES and len(refused) < _MOST_REFUSALS:
            return False
        last = (failures or refused)[-1]
        self.failure = (
            f"none of {len(records)} trials came to its end; one {last.ending}: {last.reason}"
        )
        return True

    def _open(self) -> None:
        """Load or create the study. One process at a time, because Optuna makes its tables."""
        file = self.request.folder / "study.db"
        with file.with_suffix(".lock").open("a") as lock:
            with suppress(OSError):  # SQLite reports a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            storage = self.optuna.storages.RDBStorage(
                f"sqlite:///{file.absolute()}",
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=_retry,
            )
            self.study = self.optuna.create_study(
                study_name="tune", storage=storage, load_if_exists=True,
                pruner=self.optuna.pruners.NopPruner(),
            )  # fmt: skip
            if not self.study.user_attrs and not self.study.trials:
                self.study.set_user_attr("identity", self._identity)
        if self.study.user_attrs.get("identity") != self._identity:
            raise PlanError(
                f"{self.request.folder} has trials of another recipe, space or version of DMT",
                fix="name another folder with --dir, or remove it",
            )
        if not self.whole:  # what runs was killed
            for trial in self.study.get_trials(states=self._running):
                self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
                _retry(self.study, trial)

    @contextmanager
    def _storage(self) -> Iterator[None]:
        """Raises RunFailed if the study cannot be read or written. Optuna's warning that its
        heartbeats are experimental is not shown."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            try:
                yield
            except Exception as error:  # Optuna and SQLAlchemy wrap those of SQLite
                origin: BaseException = error
                while origin.__context__ is not None:
                    origin = origin.__context__
                if isinstance(error, DmtError) or not isinstance(origin, sqlite3.Error):
                    raise
                raise RunFailed(
                    f"{self.request.folder}/study.db: {origin}",
                    fix="end what locks it, free its disk, or name another folder with --dir",
                ) from error


def make_folder(folder: Path) -> None:
    """Raises BackendUnavailable without Optuna, PlanError if the folder is a file."""
    optional("optuna", "tune", "dmt tune: optuna")
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"--dir {folder} is a file", fix="name a folder with --dir")
    folder.mkdir(parents=True, exist_ok=True)


def trial_folder(tune_dir: Path, number: int) -> Path:
    """The run directory of a trial."""
    return tune_dir / "trials" / f"{number:04d}"


def _number(trial: Any) -> int:
    """The folder number of an Optuna trial, which is that of its first start."""
    return int(trial.user_attrs.get("folder", trial.number))


def _retry(study: Any, trial: Any) -> None:
    """Enqueue a trial that was killed or interrupted."""
    facts = {"settings": trial.user_attrs.get("settings"), "folder": _number(trial)}
    study.enqueue_trial(trial.params, user_attrs=facts)
