"""`python -m toolkit.track.follower RUN_DIR`: posts a run's files to one tracker.

A separate process, so that a tracker cannot affect the training: it follows `metrics.jsonl` and
`events.jsonl` and exits on a message on its standard input or when that closes, which also
happens when the trainer is killed. Its first input line is the JSON of `FollowerSettings`; it
prints at most one line, the reason why it gave up.
"""

import fcntl
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from toolkit.run import jsonl
from toolkit.run.comparison import summary_numbers
from toolkit.run.directory import RunDirectory
from toolkit.run.events import VALIDATION
from toolkit.run.recorded import EVENT, METRICS, parse_recipe, read_events, valid
from toolkit.system.atomic import write_atomically
from toolkit.system.install import install
from toolkit.system.untrusted import read_bytes, read_json
from toolkit.text.redact import copy_to_log, redact
from toolkit.text.terminal import tell
from toolkit.track.trackers import TRACKERS
from toolkit.track.trackers.base import GaveUp, Settings, TrackedRun, Tracker

_POLL_S = 1.0
_FINISH_LIMIT_S = 300.0
"""How long an upload may continue after the trainer has ended."""
_POSTED_EVENTS = ("evaluation", "save", "skip")
"""Events whose numbers are curves: `evaluation/loss`, `save/seconds`."""


@dataclass(frozen=True)
class FollowerSettings:
    """What the trainer passes to the follower; never a secret."""

    tracker: str
    settings: Settings
    run_name: str
    trainer_pid: int


@dataclass(frozen=True)
class PostedState:
    """The run's id at a tracker, kept in RUN/TRACKER.json, and, if its store cannot be queried,
    the last posted step: written before each post.

    A kill between the two loses a few points, but never posts a step twice.
    """

    run_id: str
    posted_step: int = 0
    """Last step whose row was posted; steps repeated after a resume are not posted."""
    events_offset: int = 0
    """Bytes of events.jsonl that were posted."""

    @classmethod
    def load(cls, path: Path) -> "PostedState":
        """Read the state of an earlier start of this run, or begin with a new run id."""
        try:
            return TypeAdapter(cls).validate_python(read_json(path))
        except (OSError, ValueError):
            return cls(run_id=secrets.token_hex(8))

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)) + "\n")


class Poster:
    """Turns new lines of the two files into a tracker's rows, in the order of their steps."""

    def __init__(
        self,
        run_dir: RunDirectory,
        tracker: Tracker,
        stored: Mapping[str, int] | None,
        state: PostedState,
        state_file: Path,
    ) -> None:
        """`stored`: what `Tracker.start` returned."""
        self._run_dir = run_dir
        self._tracker = tracker
        self._newest = dict(stored or {})
        """Of every name, the last step that was posted: none is posted twice."""
        self._can_be_asked = stored is not None
        self._state = PostedState(state.run_id, -1) if self._can_be_asked else state
        self._state_file = state_file
        self._metrics_offset = 0

    def post_new(self) -> None:
        """Post what was appended since the last call."""
        # Metrics first: an event of a step is written before the next step's metrics, so
        # no event that belongs before the last row read here can still be missing.
        metrics, self._metrics_offset = _new_lines(
            self._run_dir.metrics, self._metrics_offset, METRICS
        )
        events, offset = _new_lines(self._run_dir.events, self._state.events_offset, EVENT)
        # A store that cannot be queried drops rows of earlier steps (W&B) and has those of
        # repeated ones.
        floor = self._state.posted_step
        rows: dict[int, dict[str, float]] = {}
        for record in metrics:
            self._add(rows, record["step"], _numbers(record), floor + 1)
        for record in events:
            if record.get("kind") in _POSTED_EVENTS:
                named = {
                    name if name.startswith(VALIDATION) else f"{record['kind']}/{name}": value
                    for name, value in _numbers(record).items()
                }
                self._add(rows, record.get("step", -1), named, floor)
            elif record.get("kind") == "prediction":
                self._tracker.summarize(summary_numbers(record))
        newest = floor if self._can_be_asked else max([floor, *rows])
        self._state = PostedState(self._state.run_id, newest, offset)
        if not self._can_be_asked:
            self._state.save(self._state_file)
        if rows:
            self._tracker.log(dict(sorted(rows.items())))

    def _add(
        self,
        rows: dict[int, dict[str, float]],
        step: int,
        numbers: Mapping[str, float],
        lowest: int,
    ) -> None:
        """Put what was not posted yet into its step's row; nothing of steps below `lowest`."""
        for name, value in numbers.items():
            own = self._tracker.spelled(name)
            if step >= lowest and step > self._newest.get(own, -1):
                rows.setdefault(step, {})[own] = value
                self._newest[own] = step


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line, NaN and infinity included, without its step."""
    numbers = {}
    for key, value in record.items():
        if value in ("NaN", "Infinity", "-Infinity"):
            numbers[key] = float(value)
        elif isinstance(value, int | float) and key != "step":
            numbers[key] = value
    return numbers


def _new_lines(
    path: Path, offset: int, schema: TypeAdapter[Any]
) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines behind `offset`, without malformed ones, and the offset behind
    them."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    complete = data.rfind(b"\n") + 1
    lines = jsonl.parse(data[:complete])
    return [line for line in lines if valid(schema, line) is not None], offset + complete


def follow(run_dir: RunDirectory, asked: FollowerSettings, ended: threading.Event) -> None:
    """Post until `ended` is set, then finish the run at the tracker.

    Raises GaveUp when its package is missing, or what it raises itself.
    """
    tracker = TRACKERS[asked.tracker]()
    state_file = run_dir.tracker_state(asked.tracker)
    state = PostedState.load(state_file)
    state.save(state_file)
    run = TrackedRun(run_dir, asked.run_name, state.run_id, _config(run_dir), asked.settings)
    try:
        stored = tracker.start(run)
    except ImportError as error:
        how = install(tracker.extra) if tracker.extra else f"pip install {asked.tracker}"
        raise GaveUp(f"it cannot be imported ({error}); {how}") from error
    poster = Poster(run_dir, tracker, stored, state, state_file)
    last = False
    while not last:
        last = ended.wait(_POLL_S)
        poster.post_new()
    tracker.finish(_exit_code(run_dir.events))


def _config(run_dir: RunDirectory) -> dict[str, Any]:
    """Return the resolved recipe and the plan, as they are in the run directory."""
    config = {}
    if run_dir.recipe.exists():
        config["recipe"] = parse_recipe(read_bytes(run_dir.recipe).decode())
    if run_dir.plan.exists():
        config["plan"] = read_json(run_dir.plan)
    return config


def _exit_code(events: Path) -> int:
    """Return how the run ended; 1 if it was killed before it could report it."""
    records = read_events(events)
    if records and records[-1].get("kind") == "end":
        code = records[-1].get("exit_code")
        return 1 if code is None else int(code)
    return 1


def _watch_trainer(trainer_pid: int, ended: threading.Event) -> None:
    """Set `ended` on the trainer's message, at the end of the pipe, or when the trainer is
    gone.

    A process forked by the trainer may hold the pipe open after the trainer was killed, so the
    parent's pid is checked, too.
    """

    def read_pipe() -> None:
        sys.stdin.readline()
        ended.set()

    def wait_for_orphanhood() -> None:
        while not ended.wait(_POLL_S):
            if os.getppid() != trainer_pid:
                ended.set()
        time.sleep(_FINISH_LIMIT_S)
        os._exit(1)

    for target in (read_pipe, wait_for_orphanhood):
        threading.Thread(target=target, daemon=True).start()


@contextmanager
def _alone(log: Path) -> Iterator[None]:
    """Wait until the follower of an earlier start, whose trainer was killed, has posted all."""
    with log.open("a") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _output_into(log: Path) -> Iterator[None]:
    """Send the output of this process and of what it starts to `log`, through redaction."""
    read_end, write_end = os.pipe()
    for stream in (1, 2):
        os.dup2(write_end, stream)
    os.close(write_end)

    def copy() -> None:
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as lines:
            copy_to_log(lines, log)

    copier = threading.Thread(target=copy, daemon=True)
    copier.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        copier.join(timeout=2.0)


def main(run_directory: str) -> int:
    """Follow one run; return 1 after reporting to the trainer why tracking stopped."""
    # A stop signal reaches all processes of the job; this one exits when the trainer does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    trainer = os.fdopen(os.dup(1), "w")
    run_dir = RunDirectory(Path(run_directory).absolute())
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    settings = FollowerSettings(**json.loads(sys.stdin.readline()))
    ended = threading.Event()
    _watch_trainer(settings.trainer_pid, ended)
    log = run_dir.logs / f"{settings.tracker}.log"
    with _alone(log), _output_into(log):
        try:
            follow(run_dir, settings, ended)
        except Exception as error:  # noqa: BLE001 - whatever it raises is reported
            reason = str(error) if isinstance(error, GaveUp) else _first_line(error)
            tell(f"gave up: {reason}")
            trainer.write(redact(reason).replace("\n", " ") + "\n")
            trainer.flush()
            return 1
    return 0


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


if __name__ == "__main__":
    code = main(sys.argv[1])
    # Not sys.exit: a tracker's exit hooks would wait again.
    os._exit(code)
