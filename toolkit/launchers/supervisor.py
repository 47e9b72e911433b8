"""`--max-restarts`: restarts a failed run, as long as it makes progress."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from toolkit.checkpoint.store import CheckpointStore
from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from toolkit.launchers.base import LaunchSpec, Starter
from toolkit.launchers.process import POLL_S, Deadline, StopSignals
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import PEER_LOST, events_offset, hang_of
from toolkit.run.events import EventLog
from toolkit.run.recorded import read_events
from toolkit.text.terminal import tell

_LONGEST_PAUSE_S = 30.0
_PROBE_LIMIT_S = 120.0
_PROBE = "import torch; torch.ones(8, device='cuda').sum().item()"


def supervise(
    launcher: Starter, spec: LaunchSpec, again: Callable[[], LaunchSpec], max_restarts: int
) -> int:
    """Run `spec`; if it fails, run `again()`. Returns an exit code of errors.py.

    At most `max_restarts` times in a row without a newer checkpoint than before. Only a failure
    (4) is retried: not a user error, nothing after a signal, and no failure that a rank
    reported as not retryable.
    """
    run = RunDirectory(spec.run_dir)
    attempt = 0
    with StopSignals() as signals:
        while True:
            saved, offset = newest_step(run), events_offset(run.path)
            spec.write_files()
            outcome = launcher.run(spec, signals)
            if outcome.exit_code in (EXIT_DONE, EXIT_RESUMABLE):
                return outcome.exit_code
            ended_at, events = time.time(), read_events(run.events, offset)
            reason = failure_reason(events, outcome.reason)
            failure = {"time": ended_at, "exit_code": outcome.exit_code, "reason": reason}
            EventLog(run.events).write("failure", **failure)
            if outcome.exit_code != EXIT_FAILED or signals.stop_requested or not max_restarts:
                return outcome.exit_code
            if not_retryable(events):
                return EXIT_FAILED
            step = newest_step(run)
            attempt = 1 if step > saved else attempt + 1
            if attempt > max_restarts:
                tell(given_up(max_restarts, step, reason))
                return EXIT_FAILED
            pause_s = pause_before(attempt)
            which = f"restart {attempt} of {max_restarts} from step {step}"
            tell(f"{which}, in {pause_s:g} s: {reason}")
            pause = Deadline()
            pause.start(pause_s)
            while not (pause.passed or signals.stop_requested):
                time.sleep(POLL_S)
            if signals.stop_requested:
                return _stopped(step)
            spec = again()
            # From `ended_at` on, the time belongs to the restart, including the pause and the
            # GPU check.
            fields = {"attempt": attempt, "reason": reason, "from_step": step}
            EventLog(run.events).write("restart", time=ended_at, **fields)


def not_retryable(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rank reported a failure that would come again; says so."""
    found = any(event.get("retry") is False for event in _ends(events))
    if found:
        tell("not started again: it would not help, the message above says what may")
    return found


def given_up(max_restarts: int, step: int, reason: str) -> str:
    """The message after the last restart."""
    return (
        f"error: {max_restarts} restarts in a row without a new checkpoint behind step {step}; "
        f"the last time {reason}"
    )


def pause_before(attempt: int) -> float:
    """Seconds before a restart: doubled each time, up to a limit."""
    return min(2.0 ** min(attempt - 1, 10), _LONGEST_PAUSE_S)


def newest_step(run: RunDirectory) -> int:
    """The step of the newest committed checkpoint, or of that from which the run started last.
    0 without one."""
    starts = [
        one.get("step") or 0 for one in read_events(run.events) if one.get("kind") == "start"
    ]
    stored = CheckpointStore(run.checkpoints, keep=1).newest_step()
    return max([stored, *starts[-1:]])


def failure_reason(events: Sequence[Mapping[str, Any]], outcome: str) -> str:
    """Why a launch failed, in one line: a hang, otherwise a rank's error, otherwise the
    launcher's reason.

    A killed rank reports nothing, but its peers report that they lost it.
    """
    worlds = [int(event.get("world", 0)) for event in events if event.get("kind") == "start"]
    hangs = [event for event in events if event.get("kind") == "hang"]
    if hangs:
        ranks = hang_of(hangs, range(max(worlds, default=0))).ranks
        who = f"rank {', '.join(map(str, ranks))} hung" if ranks else "all ranks waited"
        return f"{who} in step {max(int(event.get('step') or 0) for event in hangs) + 1}"
    failed = [event for event in _ends(events) if event.get("error")]
    for event in failed:
        first_line = str(event["error"]).partition("\n")[0]
        if first_line != PEER_LOST:
            return f"rank {event.get('rank', 0)}: {first_line}"
    heard = {event.get("rank") for event in _ends(events)}
    silent = [rank for rank in range(max(worlds, default=0)) if rank not in heard]
    who = f"rank {silent[0]}" if len(silent) == 1 else "a rank"
    if not failed or " was killed by " in outcome or outcome.startswith(f"{who} "):
        return outcome
    return f"{who} was killed, or its machine is gone"


def _ends(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("kind") == "end"]


def _stopped(step: int) -> int:
    if step == 0:
        tell("stopped by a signal before a restart; nothing was saved")
        return EXIT_FAILED
    tell(
        f"dmt: stopped by a signal before a restart; step {step} is saved\n"
        f"  fix: start the same command again to resume"
    )
    return EXIT_RESUMABLE


def visible_gpus(planned: int) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES; without any, those of the first `planned` GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names or [str(index) for index in range(planned)]


def working_gpus(planned: int) -> list[str]:
    """The working GPUs, by their names in CUDA_VISIBLE_DEVICES.

    Each is tested in a separate process, because a broken one may hang or crash it.
    """
    probes = {
        name: subprocess.Popen(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in visible_gpus(planned)
    }
    deadline = time.monotonic() + _PROBE_LIMIT_S
    return [name for name, probe in probes.items() if _succeeds(probe, deadline)]


def _succeeds(probe: "subprocess.Popen[bytes]", deadline: float) -> bool:
    try:
        return probe.wait(max(0.0, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        probe.kill()
        with suppress(subprocess.TimeoutExpired):
            probe.wait(1.0)  # no longer: a hanging driver call cannot be killed
        return False
