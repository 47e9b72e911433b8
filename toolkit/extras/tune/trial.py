"""One trial: `dmt launch` of a recipe with overrides, in a run directory of its own.

`run_trial` starts it in a session of its own, follows its metrics and events, and returns how
it ended. It needs no torch, may be called from a thread, and leaves no process behind: the
launcher, and with it the ranks, die with the thread that started them.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE, EXIT_USER_ERROR, DirectoryInUse, PlanError
from toolkit.launchers import LAUNCHERS
from toolkit.launchers.base import DMT
from toolkit.launchers.outcome import failure_reason, log_tail
from toolkit.launchers.process import ORPHAN_GRACE_S, Deadline, die_with_parent
from toolkit.recipe.schema import Recipe
from toolkit.run import jsonl
from toolkit.run.claim import refuse_if_claimed
from toolkit.run.directory import RunDirectory

Ending = Literal["done", "stopped", "interrupted", "refused", "out_of_memory", "hung", "failed"]
"""How a trial ended. `stopped`: by its caller's decision. `interrupted`: it saved because the
caller is ending. The same call continues it. `refused`: by the recipe's rules."""

_POLL_S = 0.1
_TAIL_LINES = 4
"""Last lines shown of a launcher that said nothing itself about its end."""
_KILL_GRACE_S = 20.0
"""Time that a launcher has to end its ranks after the third interrupt."""
_ORPHANS_S = 2 * ORPHAN_GRACE_S
"""Time that the ranks of a killed tuning have to save and end."""
_MEMORY_ERROR = re.compile(
    r"out of memory|not enough memory|can(no|')t allocate memory|MemoryError|bad_alloc",
    re.IGNORECASE,
)
"""Text in the errors of ranks, on a GPU and on a CPU."""


def check_waits(recipe: Recipe) -> None:
    """Raises PlanError if trials of a recipe cannot be started and waited for from here."""
    if recipe.parallel.outer is not None:
        fix = "--set parallel.outer=null"
        raise PlanError("parallel.outer is not for trials", fix=fix)
    if starts_locally(recipe) and recipe.cluster.nodes > 1:
        raise PlanError(
            f"trials run on one machine, the recipe has {recipe.cluster.nodes} nodes",
            fix="tune one node: --set cluster.nodes=1",
        )


def starts_locally(recipe: Recipe) -> bool:
    """Whether `local` starts the trials, because the recipe's launcher hands its jobs over."""
    return not LAUNCHERS[recipe.launch.launcher].supervises(recipe.cluster.nodes)


@dataclass
class Followed:
    """What a running trial has written so far."""

    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl, see `track.metrics.Metrics`."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events of all its starts. `evaluation` has the validation `loss` and its `step`."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of the files when they were read."""


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended, and what was measured."""

    ending: Ending
    reason: str = ""
    """Why it did not come to its end, in one line."""
    memory_gib: float | None = None
    """Peak of the fullest GPU. None on a CPU."""


def run_trial(
    recipe: Path,
    overrides: Sequence[str],
    folder: Path,
    on_progress: Callable[[Followed], bool],
    *,
    hang_s: float,
    interrupted: Callable[[], bool],
    options: Sequence[str],
) -> TrialResult:
    """Run a trial in `folder`, or continue the one that is there, and wait for its end.

    Args:
        recipe: Path or shipped name, as of `dmt launch`.
        overrides: `KEY=VALUE`, as of `--set`.
        on_progress: Called when there are new lines. True ends the trial at once, without
            a checkpoint (`stopped`).
        hang_s: Seconds that one step may take (`launch.hang_timeout_s`), the first one three
            times as long. A trial that takes longer is `hung`.
        interrupted: Polled. Once it is true, the trial saves and ends (`interrupted`).
        options: More options of `dmt launch`, e.g. `--cluster FILE`.

    What goes wrong in the trial is a result, not an exception. The output of its launcher is in
    `folder/launch.log`. Raises DirectoryInUse as `wait_until_free` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wait_until_free(folder)
    settings = [*overrides, f"launch.hang_timeout_s={hang_s:g}"]
    stated = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, *DMT, "launch", str(recipe), *stated]
    command += ["--run-dir", str(folder), *options]
    run, followed = RunDirectory(folder), Followed()
    _has_grown(run, followed)
    starts = len(followed.events)
    with _started(command, folder) as process:
        ended_by = _follow(process, run, followed, on_progress, interrupted)
    if _has_grown(run, followed):
        on_progress(followed)
    memory = [line["memory_gib"] for line in followed.metrics if line.get("memory_gib")]
    peak = max(memory, default=None)
    if ended_by is not None:
        return TrialResult(ended_by, memory_gib=peak)
    return TrialResult(*_ending(process.returncode, followed.events[starts:], folder), peak)


def wait_until_free(folder: Path) -> None:
    """Wait for the ranks that a killed tuning left in a trial's folder: they save and end.

    Raises DirectoryInUse if they do not.
    """
    limit = Deadline()
    limit.start(_ORPHANS_S)
    while True:
        try:
            return refuse_if_claimed(RunDirectory(folder))
        except DirectoryInUse:
            if limit.passed:
                raise
        time.sleep(_POLL_S)


def _has_grown(run: RunDirectory, followed: Followed) -> bool:
    """Read a run directory's files again if they have grown. True if there is a new line."""
    files = (run.metrics, run.events)
    sizes = [file.stat().st_size if file.exists() else 0 for file in files]
    if sizes == followed.sizes:
        return False
    before = len(followed.metrics), len(followed.events)
    followed.sizes = sizes
    followed.metrics, followed.events = jsonl.read(run.metrics), jsonl.read(run.events)
    return (len(followed.metrics), len(followed.events)) != before


@contextmanager
def _started(command: Sequence[str], folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the launcher. It and its ranks end when this is left, or when this thread ends."""
    with (folder / "launch.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C at the terminal is for this process, which passes it on.
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
    try:
        yield process
    finally:
        _end_launcher(process)


def _follow(
    process: "subprocess.Popen[bytes]",
    run: RunDirectory,
    followed: Followed,
    on_progress: Callable[[Followed], bool],
    interrupted: Callable[[], bool],
) -> Ending | None:
    """Wait for the end. Returns it where this function decided it, otherwise None. The ranks'
    own watchdog ends a hung trial."""
    asked = False
    while process.poll() is None:
        if _has_grown(run, followed) and on_progress(followed):
            return "stopped"
        if interrupted() and not asked:
            asked = True
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    return "interrupted" if asked and process.returncode != EXIT_DONE else None


def _ending(code: int, events: Sequence[dict[str, Any]], folder: Path) -> tuple[Ending, str]:
    """How a launcher that ended by itself did so, and why."""
    if code == EXIT_DONE:
        return "done", ""
    if code == EXIT_RESUMABLE:
        return "interrupted", ""
    said = log_tail(folder / "launch.log").splitlines()
    errors = [line for line in said if line.startswith(("error:", "dmt:"))]
    outcome = (
        errors[-1].removeprefix("dmt: ")
        if errors
        else " ".join(" ".join(said[-_TAIL_LINES:]).split())
    )
    reasons = [event["reason"] for event in events if event.get("kind") == "failure"]
    reason = str(reasons[-1]) if reasons else failure_reason(events, outcome)
    if code == EXIT_USER_ERROR:
        return "refused", reason
    if any(event.get("kind") == "hang" for event in events):
        return "hung", reason
    ends = [str(event.get("error")) for event in events if event.get("kind") == "end"]
    if any(map(_MEMORY_ERROR.search, [reason, *ends])):
        return "out_of_memory", reason
    return "failed", reason or f"exit code {code}"


def _end_launcher(process: "subprocess.Popen[bytes]") -> None:
    """End a launcher with its ranks and their children. It kills them at the third interrupt.
    If it dies itself, the kernel kills them."""
    grace = Deadline()
    grace.start(_KILL_GRACE_S)
    while process.poll() is None and not grace.passed:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2 * _POLL_S)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
