"""Posts a run's files to trackers: a thread of rank 0 for each, behind the training.

A thread reads `metrics.jsonl` and `events.jsonl` and gives their numbers to a tracker of
`accelerate.tracking`. A tracker that raises or hangs ends its thread, never the run. None of
their packages is imported before: `dmt doctor` reads the table.
"""

import json
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import TypeAdapter

from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from toolkit.recipe.schema import LoggingSection
from toolkit.run import jsonl
from toolkit.run.changes import parse_recipe
from toolkit.run.comparison import summary_numbers
from toolkit.run.directory import RunDirectory
from toolkit.run.events import VALIDATION, EventLog
from toolkit.system.atomic import write_atomically
from toolkit.system.install import install
from toolkit.system.untrusted import read_bytes, read_json
from toolkit.text.dotted import leaves
from toolkit.text.redact import redact
from toolkit.text.terminal import tell

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_POSTED_EVENTS = ("evaluation", "save", "skip")
"""Events whose numbers are curves: `evaluation/loss`, `save/seconds`."""
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow's names of metrics and parameters may not have."""
_LONGEST_PARAMETER = 500
"""Letters of a parameter that every server of MLflow takes."""


@dataclass
class Posted:
    """What a tracker has of this run. Kept in RUN/TRACKER.json."""

    run_id: str
    """The run's id at the tracker, the same in every start. Empty where it chooses one."""
    names: dict[str, int] = field(default_factory=dict)
    """The last posted step of every name: none is posted twice."""

    @classmethod
    def load(cls, path: Path) -> "Posted | None":
        """Read the state of an earlier start of this run. None if there is none."""
        try:
            return TypeAdapter(cls).validate_python(read_json(path))
        except (OSError, ValueError):
            return None

    def takes(self, step: int, name: str) -> bool:
        """Whether a number is new, and of no earlier step than the last."""
        last = max(self.names.values(), default=0)
        return step >= last and step > self.names.get(name, -1)

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True)
class TrackerRun:
    """A run at a tracker."""

    run_id: str
    log: Callable[[Mapping[str, float], int], object]
    """Give it the numbers of one step."""
    finish: Callable[[int], object]
    """Flush what it holds. Takes the run's exit code."""


@dataclass(frozen=True)
class Tracker:
    """One tracker of `accelerate.tracking`, by its name there."""

    title: str
    """The tracker's name in messages."""
    start: Callable[[RunDirectory, str, str, str], TrackerRun]
    """Starts, or continues, a run: its directory, name, project and id."""
    packages: tuple[str, ...] = ()
    """Distributions that it needs and DMT itself does not."""
    not_inherited: tuple[str, ...] = ()
    """Environment variables of another run around this one, which say nothing of this one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in rank 0: no reports to the tracker's maker, fewer messages."""
    stores_at_once: bool = False
    """Whether a row is stored when `log` returns. Otherwise it is within `_POLL_S`."""
    adds_to_rows: bool = True
    """Whether it takes more numbers of a step later, also in another start."""


class Trackers:
    """The trackers of a run, in rank 0."""

    def __init__(
        self, run: RunDirectory, run_name: str, logging: LoggingSection, events: EventLog
    ) -> None:
        """Start a thread for each. Call this behind MetricsLog.resume."""
        self._posters = [
            Poster(run, name, redact(run_name), logging.project, events)
            for name in wanted(logging)
        ]
        for poster in self._posters:
            poster.start()

    def finish(self, timeout_s: float, exit_code: int) -> None:
        """Let all post the remaining values at the same time, at most that long."""
        until = time.monotonic() + timeout_s
        for poster in self._posters:
            poster.end(exit_code)
        for poster in self._posters:
            poster.join(max(0.0, until - time.monotonic()))
            if poster.is_alive():
                poster.fail(f"it did not finish within {timeout_s:g} s")


class Poster(threading.Thread):
    """Posts the lines of one run to one tracker. Reports, once, why it cannot."""

    def __init__(
        self, run: RunDirectory, tracker: str, run_name: str, project: str, events: EventLog
    ) -> None:
        super().__init__(daemon=True, name=f"post to {tracker}")
        self._run, self._key, self._events = run, tracker, events
        self._tracker = TRACKERS[tracker]
        self._run_name, self._project = run_name, project
        self._ended = threading.Event()
        self._exit_code = EXIT_FAILED
        self._failed = False

    def run(self) -> None:
        try:
            self._post()
        except ImportError as error:
            how = install(self._key) if self._tracker.packages else f"pip install {self._key}"
            self.fail(f"it cannot be imported ({error}); {how}")
        except (Exception, SystemExit) as error:
            text = str(error).strip().splitlines()
            self.fail(": ".join([type(error).__name__, *text[:1]]))
            logger.info("%s stopped working", self._key, exc_info=error)

    def end(self, exit_code: int) -> None:
        """The run has ended: post what is left, then end the thread."""
        self._exit_code = exit_code
        self._ended.set()

    def fail(self, reason: str) -> None:
        """Report that the tracker does not work."""
        if self._failed:
            return
        self._failed = True
        self._events.write("warning", source=self._key, message=reason)
        unharmed = "Training is not affected; metrics.jsonl has everything"
        tell(f"{self._tracker.title} is off: {reason}. {unharmed}")

    def _post(self) -> None:
        for variable in self._tracker.not_inherited:
            os.environ.pop(variable, None)
        os.environ.update(self._tracker.environment)
        file = self._run.tracker_state(self._key)
        new = Posted("" if self._key == "mlflow" else secrets.token_hex(8))
        posted = Posted.load(file) or new
        if posted.run_id:
            posted.save(file)  # if this start is killed, the next one continues the same run
        there = self._tracker.start(self._run, self._run_name, self._project, posted.run_id)
        posted.run_id = there.run_id
        posted.save(file)
        rows, ended = _Rows(self._run), False
        while not ended:
            ended = self._ended.wait(_POLL_S)
            posted.save(file)  # of the last poll, whose rows are stored by now
            # Another start may add a validation to the newest step of one that did not finish.
            newest = self._tracker.adds_to_rows or (ended and self._exit_code == EXIT_DONE)
            for step, row in rows.new(posted, newest=newest):
                there.log(row, step)
                posted.names.update(dict.fromkeys(row, step))
                if self._tracker.stores_at_once:
                    posted.save(file)
        there.finish(self._exit_code)
        posted.save(file)


class _Rows:
    """The numbers of the two files by step, in the order of steps."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._offsets: dict[Path, int] = {}
        self._rows: dict[int, dict[str, float]] = {}
        self._newest = 0
        """The last step in `metrics.jsonl`."""

    def new(self, posted: Posted, *, newest: bool) -> Iterator[tuple[int, dict[str, float]]]:
        """The rows that were appended since the last call and are not posted; those of the
        newest step, to which more may be added, only if `newest`.

        An event of a step is written before the next step's metrics. So metrics are read first,
        and every event of earlier steps is there when the events are read.
        """
        for path in (self._run.metrics, self._run.events):
            for line in self._new_lines(path):
                if not isinstance(step := line.get("step"), int):
                    continue
                if path == self._run.metrics:
                    self._newest = max(self._newest, step)
                for name, value in _numbers(line).items():
                    if posted.takes(step, name):
                        self._rows.setdefault(step, {})[name] = value
        for step in sorted(self._rows):
            if step < self._newest or newest:
                yield step, self._rows.pop(step)

    def _new_lines(self, path: Path) -> Sequence[dict[str, Any]]:
        """The complete lines that were appended since the last call."""
        if not path.exists():
            return []
        offset = self._offsets.get(path, 0)
        data = read_bytes(path, jsonl.LARGEST, offset)
        complete = data.rfind(b"\n") + 1
        self._offsets[path] = offset + complete
        return [*jsonl.parse(data[:complete])]


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by their names at a tracker, NaN and infinity included. None for an
    event that is not posted."""
    kind = line.get("kind")
    prefix = f"{kind}/" if kind in _POSTED_EVENTS else ""
    if kind == "prediction":
        line = summary_numbers(line)
    elif kind is not None and not prefix:
        return {}
    numbers = {}
    for key, value in line.items():
        name = key if key.startswith(VALIDATION) else prefix + key
        if key != "step" and (isinstance(value, int | float) or value in _NOT_FINITE):
            numbers[name] = float(value)
    return numbers


def _of_accelerate(kind: str, /, *arguments: Any, **keywords: Any) -> Any:
    """A tracker of Accelerate's, started without Accelerate's own state of processes."""
    from accelerate import tracking

    # Its own logger refuses to work without that state.
    tracking.logger = logging.getLogger(tracking.__name__)
    base = tracking.LOGGER_TYPE_TO_CLASS[kind]
    alone = type(base.__name__, (base,), {"main_process_only": False})
    tracker = alone(*arguments, **keywords)
    tracker.start()
    return tracker


def _tensorboard(run: RunDirectory, _name: str, _project: str, run_id: str) -> TrackerRun:
    tracker = _of_accelerate("tensorboard", "tensorboard", run.path)

    def log(row: Mapping[str, float], step: int) -> None:
        tracker.log({n if "/" in n else f"train/{n}": row[n] for n in row}, step=step)

    return TrackerRun(run_id, log, lambda _: tracker.finish())


def _trackio(run: RunDirectory, run_name: str, project: str, run_id: str) -> TrackerRun:
    tracker = _of_accelerate(
        "trackio",
        project,
        name=f"{run_name}-{run_id[:8]}",
        resume="allow",
        config=_config(run),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackerRun(run_id, tracker.log, lambda _: tracker.finish())


def _mlflow(run: RunDirectory, run_name: str, project: str, run_id: str) -> TrackerRun:
    import mlflow

    tracker = _of_accelerate(
        "mlflow",
        project,
        run_id=run_id or None,
        run_name=run_name,
        # MLflow would record the user and the program.
        tags={"mlflow.user": "", "mlflow.source.name": "dmt"},
    )
    if not run_id:
        # If this start is killed, the next one continues the same run.
        Posted(tracker.tracker.info.run_id).save(run.tracker_state("mlflow"))
        parameters = {_allowed(key): value for key, value in leaves(_config(run))}
        tracker.store_init_configuration(
            {key: str(value)[:_LONGEST_PARAMETER] for key, value in parameters.items()}
        )
    ends = {EXIT_DONE: "FINISHED", EXIT_RESUMABLE: "KILLED"}

    def log(row: Mapping[str, float], step: int) -> None:
        tracker.log({_allowed(name): row[name] for name in row}, step=step)

    return TrackerRun(
        tracker.tracker.info.run_id,
        log,
        lambda code: mlflow.end_run(ends.get(code, "FAILED")),
    )


def _allowed(name: str) -> str:
    """A name that MLflow takes."""
    return _FORBIDDEN.sub("_", name)


def _wandb(run: RunDirectory, run_name: str, project: str, run_id: str) -> TrackerRun:
    import wandb

    run.wandb.mkdir(exist_ok=True)
    with tempfile.TemporaryFile(dir=run.wandb):
        pass  # W&B would fall back to the machine's temporary folder silently
    with suppress(OSError), Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # W&B would ask for a key on the terminal
    mode = wandb_mode()
    known, flushes = wandb.Settings.model_fields, {"x_transaction_log_flush_interval": 0.5}
    tracker = _of_accelerate(
        "wandb",
        project,
        mode=mode,
        name=run_name,
        id=run_id,
        resume="allow" if mode == "online" else None,
        dir=run.path,
        config=_config(run),
        settings=wandb.Settings(
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            console="off",
            host="",
            program="dmt",
            silent=True,
            **{key: value for key, value in flushes.items() if key in known},
        ),
    )

    tracker.tracker.define_metric("step")
    tracker.tracker.define_metric("*", step_metric="step")

    def log(row: Mapping[str, float], step: int) -> None:
        row = {**row, "step": step}
        tracker.log(row, step=step, commit=True)  # else it is held until the next one

    def finish(exit_code: int) -> None:
        if exit_code == EXIT_RESUMABLE:
            tracker.tracker.mark_preempting()
        tracker.tracker.finish(exit_code=exit_code)
        wandb.teardown(exit_code=exit_code)
        if mode == "offline":
            tell(f"to upload the run to W&B: wandb sync {quote(str(run.wandb))}")

    return TrackerRun(run_id, log, finish)


def _config(run: RunDirectory) -> dict[str, Any]:
    """The resolved recipe and the plan as the run directory has them, without secrets."""
    config: dict[str, Any] = {}
    if run.recipe.exists():
        config["recipe"] = parse_recipe(read_bytes(run.recipe).decode())
    if run.plan.exists():
        config["plan"] = read_json(run.plan)
    return config


TRACKERS = {
    "wandb": Tracker(
        "W&B",
        _wandb,
        not_inherited=("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR"),
        environment={"WANDB_ERROR_REPORTING": "false"},
        adds_to_rows=False,
    ),
    "tensorboard": Tracker("TensorBoard", _tensorboard, ("tensorboard",), stores_at_once=True),
    "mlflow": Tracker(
        "MLflow",
        _mlflow,
        ("mlflow-skinny", "sqlalchemy", "alembic"),
        not_inherited=(
            *("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"),
            *("MLFLOW_TAGS", "MLFLOW_NESTED_RUN"),
        ),
        environment={"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"},
        stores_at_once=True,
    ),
    "trackio": Tracker("trackio", _trackio, ("trackio",)),
}
"""Every tracker by its name in `logging.trackers`."""


def wandb_mode() -> str:
    """The environment's WANDB_MODE: `online` posts to W&B's server, `offline`, the default,
    writes `wandb/` in the run directory, `disabled` is as if the recipe had no W&B."""
    return os.environ.get("WANDB_MODE") or "offline"


def wanted(logging: LoggingSection) -> Iterator[str]:
    """The names of the trackers that a recipe turns on."""
    for name in TRACKERS:
        if name in logging.trackers and (name, wandb_mode()) != ("wandb", "disabled"):
            yield name


def trackers_line(logging: LoggingSection) -> str:
    """The trackers of a run in its announcement. Empty without any."""
    mode = {"wandb": f" ({wandb_mode()})"}
    titles = [TRACKERS[name].title + mode.get(name, "") for name in wanted(logging)]
    return f"logging to {', '.join(titles)}, project {logging.project}" if titles else ""
