"""`python -m toolkit.track.wandb_follower RUN_DIR`: posts a run's files to W&B.

A process of its own, so that nothing that W&B does can reach the training: it follows
`metrics.jsonl` and `events.jsonl` and ends when its standard input says so or closes,
which it also does when the trainer is killed. Its first input line is the JSON of
`FollowerSettings`; it prints at most one line, the reason why it gave up.
"""

import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML

from toolkit.errors import EXIT_RESUMABLE
from toolkit.redact import redact
from toolkit.run import jsonl
from toolkit.run.comparison import summary_numbers
from toolkit.run.directory import RunDirectory
from toolkit.terminal import tell
from toolkit.untrusted import read_json

_POLL_S = 1.0
_FINISH_LIMIT_S = 300.0
"""How long an upload may continue after the trainer has ended."""

VALIDATION = "validation/"
"""How the names of the losses of validation sources begin in an `evaluation` event."""
_POSTED_EVENTS = ("evaluation", "save", "skip")
"""Events whose numbers are curves: `evaluation/loss`, `save/seconds`."""


@dataclass(frozen=True)
class FollowerSettings:
    """What the trainer passes to the follower; never a secret."""

    project: str
    entity: str | None
    mode: Literal["online", "offline", "disabled"]
    tags: tuple[str, ...]
    run_name: str
    trainer_pid: int


@dataclass(frozen=True)
class PostedState:
    """How far W&B knows the run; kept in `wandb.json`, written before each post.

    A kill between the two loses a few points on W&B, but never shows a step twice.
    """

    run_id: str
    posted_step: int = 0
    """Last step whose row was posted; steps done again after a resume are not."""
    events_offset: int = 0
    """Bytes of events.jsonl that were posted."""

    @classmethod
    def load(cls, path: Path) -> "PostedState":
        """Read the state of an earlier start of this run, or begin with a new run id."""
        try:
            return cls(**read_json(path))
        except (OSError, ValueError, TypeError):
            return cls(run_id=secrets.token_hex(8))

    def save(self, path: Path) -> None:
        """Replace the file."""
        jsonl.write_atomically(path, json.dumps(asdict(self)) + "\n")


class GaveUp(Exception):
    """W&B cannot be used; the text is for the user."""


class Poster:
    """Turns new lines of the two files into W&B rows, in the order of their steps."""

    def __init__(self, run_dir: RunDirectory, run: Any, state: PostedState) -> None:
        self._run_dir = run_dir
        self._run = run
        self._state = state
        self._metrics_offset = 0

    def post_new(self) -> None:
        """Post what was appended since the last call."""
        # Metrics first: an event of a step is written before the next step's metrics, so
        # no event that belongs before the last row read here can still be missing.
        metrics, self._metrics_offset = _new_lines(self._run_dir.metrics, self._metrics_offset)
        events, offset = _new_lines(self._run_dir.events, self._state.events_offset)
        rows: dict[int, dict[str, Any]] = {}
        for record in metrics:
            if (step := record["step"]) > self._state.posted_step:
                rows.setdefault(step, {}).update(_numbers(record))
        for record in events:
            # W&B drops rows of earlier steps, and those of a redone step are there already.
            step = record.get("step", -1)
            if record["kind"] in _POSTED_EVENTS and step >= self._state.posted_step:
                for name, value in _numbers(record).items():
                    own = name.startswith(VALIDATION)
                    curve = name if own else f"{record['kind']}/{name}"
                    rows.setdefault(step, {})[curve] = value
            elif record["kind"] == "prediction":
                self._run.summary.update(summary_numbers(record))
        newest = max([self._state.posted_step, *rows])
        self._state = PostedState(self._state.run_id, newest, offset)
        self._state.save(self._run_dir.wandb_state)
        for step in sorted(step for step, row in rows.items() if row):
            self._run.log({**rows[step], "step": step}, step=step)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line, NaN and infinity included, without its step."""
    numbers = {}
    for key, value in record.items():
        if value in ("NaN", "Infinity", "-Infinity"):
            numbers[key] = float(value)
        elif isinstance(value, int | float) and key != "step":
            numbers[key] = value
    return numbers


def _new_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines behind `offset`, and the offset behind them."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    complete = data.rfind(b"\n") + 1
    return list(jsonl.parse(data[:complete])), offset + complete


def follow(run_dir: RunDirectory, settings: FollowerSettings, ended: threading.Event) -> None:
    """Post until `ended` is set, then finish the run on W&B.

    Raises GaveUp when W&B is missing, its folder cannot be written or went away.
    """
    try:
        import wandb
    except ImportError as error:
        raise GaveUp(f"wandb cannot be imported ({error}); pip install wandb") from error
    _check_writable(run_dir.wandb)
    state = PostedState.load(run_dir.wandb_state)
    state.save(run_dir.wandb_state)
    run = wandb.init(
        project=settings.project,
        entity=settings.entity,
        mode=settings.mode,
        tags=settings.tags,
        name=settings.run_name,
        id=state.run_id,
        resume="allow" if settings.mode == "online" else None,
        dir=run_dir.path,
        config=_config(run_dir),
        settings=_private_settings(wandb),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    files = Path(run.dir)
    poster = Poster(run_dir, run, state)
    last = False
    while not last:
        last = ended.wait(_POLL_S)
        if not files.exists():
            raise GaveUp(f"its folder {files.parent} was removed")
        poster.post_new()
    exit_code = _exit_code(run_dir.events)
    if exit_code == EXIT_RESUMABLE:
        run.mark_preempting()
    run.finish(exit_code=exit_code)
    # wandb-core would notice by itself, but only later, that its user is gone.
    wandb.teardown(exit_code=exit_code)


def _private_settings(wandb: Any) -> Any:
    """Return settings that keep command line, host, paths and console away from W&B."""
    return wandb.Settings(
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
    )


def _check_writable(folder: Path) -> None:
    # W&B would fall back to the machine's temporary folder silently.
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise GaveUp(f"{folder} cannot be written ({error.strerror})") from error


def _config(run_dir: RunDirectory) -> dict[str, Any]:
    """Return the resolved recipe and the plan, as they are in the run directory."""
    config = {}
    if run_dir.recipe.exists():
        config["recipe"] = YAML(typ="safe").load(run_dir.recipe.read_text(encoding="utf-8"))
    if run_dir.plan.exists():
        config["plan"] = read_json(run_dir.plan)
    return config


def _exit_code(events: Path) -> int:
    """Return how the run ended; 1 when it was killed before it could say so."""
    records = jsonl.read(events)
    if records and records[-1]["kind"] == "end":
        return int(records[-1].get("exit_code", 1))
    return 1


def _watch_trainer(trainer_pid: int, ended: threading.Event) -> None:
    """Set `ended` at the trainer's word, at the end of the pipe, or when it is gone.

    A process that the trainer forked may hold the pipe open after the trainer was
    killed: so the parent's number is looked at, too.
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
def _output_into(log: Path) -> Iterator[None]:
    """Send this process's and wandb-core's output to `log`, through redaction."""
    read_end, write_end = os.pipe()
    for stream in (1, 2):
        os.dup2(write_end, stream)
    os.close(write_end)

    def copy() -> None:
        with (
            os.fdopen(read_end, encoding="utf-8", errors="replace") as lines,
            log.open("a", encoding="utf-8") as file,
        ):
            for line in lines:
                file.write(redact(line))
                file.flush()

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
    """Follow one run; return 1 after telling the trainer why W&B was given up."""
    # Whoever stops the job signals all of it; this process ends when the trainer does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    trainer = os.fdopen(os.dup(1), "w")
    run_dir = RunDirectory(Path(run_directory).absolute())
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    settings = FollowerSettings(**json.loads(sys.stdin.readline()))
    ended = threading.Event()
    _watch_trainer(settings.trainer_pid, ended)
    with _output_into(run_dir.logs / "wandb.log"):
        try:
            follow(run_dir, settings, ended)
        except Exception as error:  # noqa: BLE001 - whatever W&B raises is reported
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
    # Not sys.exit: W&B's exit hooks would wait again for what was given up.
    os._exit(code)
