"""Posts a run's files to trackers: a thread of rank 0 for each, behind the training.

A thread reads `metrics.jsonl` and `events.jsonl` and gives their numbers to a tracker of
`accelerate.tracking`. A tracker that raises or hangs ends its thread, never the run.
"""

import json
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import TypeAdapter

from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from toolkit.recipe.schema import LoggingSection
from toolkit.run import jsonl
from toolkit.run.comparison import summary_numbers
from toolkit.run.directory import RunDirectory
from toolkit.run.events import VALIDATION, EventLog
from toolkit.run.recorded import parse_recipe, read_events
from toolkit.system.atomic import write_atomically
from toolkit.system.install import install
from toolkit.system.untrusted import read_bytes, read_json
from toolkit.text.dotted import leaves
from toolkit.text.redact import redact
from toolkit.text.terminal import tell
from toolkit.track.trackers import TRACKERS, Settings, wanted

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_POSTED_EVENTS = ("evaluation", "save", "skip")
"""Events whose numbers are curves: `evaluation/loss`, `save/seconds`."""
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""In MLflow's names of metrics and parameters."""
_LONGEST_PARAMETER = 500
"""Letters of a parameter that every server of MLflow takes."""


@dataclass(frozen=True)
class Posted:
    """What a tracker has of this run; kept in RUN/TRACKER.json."""

    run_id: str
    """The run's id at the tracker, the same in every start."""
    posted_step: int = 0
    """The last step of which a number was posted."""
    names: Mapping[str, int] = field(default_factory=dict)
    """The last posted step of every name: none is posted twice."""

    @classmethod
    def load(cls, path: Path) -> "Posted | None":
        """Read the state of an earlier start of this run; None if there is none."""
        try:
            state = TypeAdapter(cls).validate_python(read_json(path))
        except (OSError, ValueError):
            return None
        return state if state.posted_step >= 0 else None  # -1: of a release before this file

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)) + "\n")


class Trackers:
    """The trackers of a run, in rank 0."""

    def __init__(
        self, run: RunDirectory, run_name: str, logging: LoggingSection, events: EventLog
    ) -> None:
        """Start a thread for each; call this behind MetricsLog.resume."""
        self._posters = [
            TrackerThread(run, name, settings, redact(run_name), events)
            for name, settings in wanted(logging)
        ]

    def problems(self) -> Iterator[str]:
        """A line for each tracker that stopped working, once; waits for nothing."""
        yield from filter(None, (poster.problem() for poster in self._posters))

    def finish(self, timeout_s: float) -> None:
        """Let all post the remaining values at the same time, at most that long; call this
        behind the `end` event."""
        until = time.monotonic() + timeout_s
        for poster in self._posters:
            poster.ended.set()
        for poster in self._posters:
            if line := poster.finish(max(0.0, until - time.monotonic()), timeout_s):
                tell(line)


class TrackerThread:
    """Posts the lines of one run to one tracker."""

    def __init__(
        self,
        run: RunDirectory,
        name: str,
        settings: Settings,
        run_name: str,
        events: EventLog,
    ) -> None:
        self._run, self._name, self._settings, self._run_name = run, name, settings, run_name
        self._events = events
        self.ended = threading.Event()
        """Set when the run has ended: what is left is posted, then the thread ends."""
        self._reason: str | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"post to {name}")
        self._thread.start()

    def problem(self) -> str | None:
        """Return, once, why the tracker does not work."""
        if self._reason is None or self._reported:
            return None
        self._reported = True
        self._events.write("warning", source=self._name, message=self._reason)
        return redact(
            f"{TRACKERS[self._name].title} is off: {self._reason}. Training is not affected; "
            "metrics.jsonl has everything"
        )

    def finish(self, remaining_s: float, limit_s: float) -> str | None:
        """Wait for its end; return a line for the user, if there is one."""
        self._thread.join(remaining_s)
        if self._thread.is_alive() and self._reason is None:
            self._reason = f"it did not finish within {limit_s:g} s"
        if self._reason is None and self._name == "wandb":
            return _how_to_upload(self._run, self._settings)
        return self.problem()

    def _work(self) -> None:
        try:
            self._post_all()
        except ImportError as error:
            packages = TRACKERS[self._name].packages
            how = install(self._name) if packages else f"pip install {self._name}"
            self._reason = redact(f"it cannot be imported ({error}); {how}")
        except (Exception, SystemExit) as error:
            text = str(error).strip().splitlines()
            self._reason = redact(": ".join([type(error).__name__, *text[:1]]))
            logger.info("%s stopped working", self._name, exc_info=error)

    def _post_all(self) -> None:
        file = self._run.tracker_state(self._name)
        before = Posted.load(file)
        tracker = _start(self._name, self._run, self._run_name, self._settings, before)
        lines = _Lines(self._run)
        stored, last = tracker.posted, False
        while not last:
            last = self.ended.wait(_POLL_S)
            stored.save(file)  # of the last poll
            for step, row in lines.new_rows(tracker.posted):
                before = tracker.posted
                tracker.log(row, step)
                tracker.posted = _with_row(before, step, row)
                stored = before if tracker.holds_newest else tracker.posted
                if tracker.stores_at_once:
                    stored.save(file)
        tracker.finish(_exit_code(self._run.events))
        tracker.posted.save(file)


def _with_row(posted: Posted, step: int, row: Mapping[str, float]) -> Posted:
    names = {**posted.names, **dict.fromkeys(row, step)}
    return replace(posted, posted_step=max(step, posted.posted_step), names=names)


class _Lines:
    """The numbers of new lines of the two files, in the order of their steps."""

    def __init__(self, run: RunDirectory) -> None:
        self._files = {run.metrics: 0, run.events: 0}

    def new_rows(self, posted: Posted) -> Sequence[tuple[int, dict[str, float]]]:
        """The rows that were appended since the last call and are not posted."""
        # Metrics first: an event of a step is written before the next step's metrics, so
        # no event that belongs before the last row read here can still be missing.
        rows: dict[int, dict[str, float]] = {}
        for file, offset in self._files.items():
            lines, self._files[file] = _new_lines(file, offset)
            for line in lines:
                step = line.get("step")
                if not isinstance(step, int):
                    continue
                for name, value in _numbers(line).items():
                    # W&B takes no earlier step than its last.
                    if step >= posted.posted_step and step > posted.names.get(name, -1):
                        rows.setdefault(step, {})[name] = value
        return sorted(rows.items())


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by their names at a tracker, NaN and infinity included; none for an
    event that is not posted."""
    kind = line.get("kind")
    if kind == "prediction":
        line, prefix = summary_numbers(line), ""
    elif kind in _POSTED_EVENTS:
        prefix = f"{kind}/"
    elif kind is not None:
        return {}
    else:
        prefix = ""
    numbers = {}
    for key, value in line.items():
        name = key if key.startswith(VALIDATION) else prefix + key
        if key != "step" and (isinstance(value, int | float) or value in _NOT_FINITE):
            numbers[name] = float(value)
    return numbers


def _new_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The complete lines behind `offset`, and the offset behind them."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    complete = data.rfind(b"\n") + 1
    return [*jsonl.parse(data[:complete])], offset + complete


def _exit_code(events: Path) -> int:
    """How the run ended."""
    records = read_events(events)
    if records and records[-1].get("kind") == "end":
        return int(records[-1].get("exit_code") or 0)
    return EXIT_FAILED


class _AccelerateTracker:
    """A tracker of Accelerate's, without Accelerate's own state of processes."""

    stores_at_once = False
    """Whether a row is stored when `log` returns; otherwise it is within `_POLL_S`."""
    holds_newest = False
    """Whether the newest row is stored only when another one comes."""

    def __init__(self, name: str, posted: Posted, /, *arguments: Any, **keywords: Any) -> None:
        from accelerate import tracking

        # Its own logger refuses to work without Accelerate's state.
        tracking.logger = logging.getLogger(tracking.__name__)
        base = tracking.LOGGER_TYPE_TO_CLASS[name]
        alone = type(base.__name__, (base,), {"main_process_only": False})
        self._tracker = alone(*arguments, **keywords)
        self._tracker.start()
        self.posted = posted

    @property
    def native(self) -> Any:
        """The package's own run."""
        return self._tracker.tracker

    def store(self, config: Mapping[str, Any]) -> None:
        """Give it the parameters of a new run."""
        self._tracker.store_init_configuration(dict(config))

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Give it the numbers of one step."""
        self._tracker.log(dict(row), step=step)

    def finish(self, exit_code: int) -> None:  # noqa: ARG002 - where it has a place for it
        """Flush what it holds."""
        self._tracker.finish()


class _TensorBoard(_AccelerateTracker):
    stores_at_once = True

    def log(self, row: Mapping[str, float], step: int) -> None:
        names = {name if "/" in name else f"train/{name}": row[name] for name in row}
        super().log(names, step)


class _Mlflow(_AccelerateTracker):
    stores_at_once = True

    def log(self, row: Mapping[str, float], step: int) -> None:
        super().log({_FORBIDDEN.sub("_", name): row[name] for name in row}, step)

    def finish(self, exit_code: int) -> None:
        import mlflow

        mlflow.end_run(
            {EXIT_DONE: "FINISHED", EXIT_RESUMABLE: "KILLED"}.get(exit_code, "FAILED")
        )


class _Wandb(_AccelerateTracker):
    holds_newest = True

    def log(self, row: Mapping[str, float], step: int) -> None:
        super().log({**row, "step": step}, step)

    def finish(self, exit_code: int) -> None:
        import wandb

        if exit_code == EXIT_RESUMABLE:
            self.native.mark_preempting()
        self.native.finish(exit_code=exit_code)
        wandb.teardown(exit_code=exit_code)


def _start(
    name: str, run: RunDirectory, run_name: str, settings: Settings, before: Posted | None
) -> _AccelerateTracker:
    """Start, or continue, the run at a tracker."""
    for variable in TRACKERS[name].not_inherited:
        os.environ.pop(variable, None)
    os.environ.update(TRACKERS[name].environment)
    posted = before or Posted(secrets.token_hex(8))
    if name == "tensorboard":
        return _TensorBoard(name, posted, "tensorboard", run.path)
    if name == "mlflow":
        return _mlflow(run, run_name, settings, before)
    posted.save(run.tracker_state(name))
    if name == "wandb":
        return _wandb(run, run_name, settings, posted)
    return _AccelerateTracker(
        name,
        posted,
        settings["project"],
        name=f"{run_name}-{posted.run_id[:8]}",
        resume="allow",
        config=_config(run),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


def _mlflow(
    run: RunDirectory, run_name: str, settings: Settings, before: Posted | None
) -> _AccelerateTracker:
    import mlflow

    if settings["tracking_uri"]:
        mlflow.set_tracking_uri(settings["tracking_uri"])
    posted = before or Posted("")
    # MLflow would record the user and the program.
    tags = {"mlflow.user": "", "mlflow.source.name": "dmt"}
    run_id = posted.run_id or None
    tracker = _Mlflow(
        "mlflow",
        posted,
        settings["experiment"],
        run_id=run_id,
        run_name=run_name,
        tags=tags,
    )
    if before is None:
        tracker.posted = Posted(tracker.native.info.run_id)
        tracker.posted.save(run.tracker_state("mlflow"))
        tracker.store(
            {
                _FORBIDDEN.sub("_", key): str(value)[:_LONGEST_PARAMETER]
                for key, value in leaves(_config(run))
            }
        )
    return tracker


def _wandb(
    run: RunDirectory, run_name: str, settings: Settings, posted: Posted
) -> _AccelerateTracker:
    import wandb

    run.wandb.mkdir(exist_ok=True)
    with tempfile.TemporaryFile(dir=run.wandb):
        pass  # W&B would fall back to the machine's temporary folder silently
    with suppress(OSError), Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # W&B would ask for a key on the terminal
    known, flushes = wandb.Settings.model_fields, {"x_transaction_log_flush_interval": 0.5}
    tracker = _Wandb(
        "wandb",
        posted,
        settings["project"],
        **{key: settings[key] for key in ("entity", "mode")},
        tags=[redact(tag) for tag in settings["tags"]],
        name=run_name,
        id=posted.run_id,
        resume="allow" if settings["mode"] == "online" else None,
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
    tracker.native.define_metric("step")
    tracker.native.define_metric("*", step_metric="step")
    return tracker


def _config(run: RunDirectory) -> dict[str, Any]:
    """The resolved recipe and the plan as the run directory has them, without secrets."""
    config: dict[str, Any] = {}
    if run.recipe.exists():
        config["recipe"] = parse_recipe(read_bytes(run.recipe).decode())
    if run.plan.exists():
        config["plan"] = read_json(run.plan)
    return config


def _how_to_upload(run: RunDirectory, settings: Settings) -> str | None:
    """How to upload what W&B wrote offline: each start of a run has its own folder."""
    parts = list(run.wandb.glob("offline-run-*"))
    if settings["mode"] != "offline" or not parts:
        return None
    what = "the run" if len(parts) == 1 else f"all {len(parts)} starts of the run"
    return f"to upload {what} to W&B: wandb sync {quote(str(run.wandb))}"
