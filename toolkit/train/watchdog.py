"""Detects hung ranks: heartbeats of all ranks, and a time limit for each one's work.

Every rank has a thread that rewrites RUN/heartbeats/rank-N.json. It continues while the main
thread waits or hangs, so a stale file means a stopped process (SIGSTOP, a dead machine). The
main thread marks what it begins and ends; without a mark within the time limit, every rank
writes its stacks to its log, one of them reports what all are doing, and all exit.

There are three threads, so that nothing that blocks keeps this rank from exiting: one writes
heartbeats (a disk may be lost), one counts the time, and one of faulthandler's, which needs no
interpreter, ends the process if the counting stops (C code that holds the interpreter's lock).

Files are compared by their changes, never by a clock, because machines' clocks differ.
"""

import faulthandler
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from toolkit.errors import EXIT_FAILED
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import STACKS_SIGNAL, grace_over
from toolkit.run.events import EventLog
from toolkit.system.untrusted import read_json
from toolkit.text.terminal import tell
from toolkit.train.phases import WAITING
from toolkit.train.signals import StopRequest

LONGEST_BEAT_S = 10.0
RANK_ZERO_BEAT_S = 1.0
"""Rank 0's file also records the step that a killed run had reached."""
_BEATS_PER_LIMIT = 20
_BEATS_TO_LOOK = 3
"""Number of beats after which an unchanged heartbeat is stale."""
_LAUNCHER_GRACE_S = 1.0
"""A launcher that was asked to stop ends the ranks itself; this much later, the watchdog
does."""
_PAUSE_S = 1.0
"""How much later than the rank with the message the others exit: the first message is shown."""
_TELLING_S = 10.0
"""Time that an exiting rank may take to record the reason: the disk may hang."""
_READING_S = 5.0
"""Time that a look at all heartbeats may take; of more ranks than can be read within it, the
last ones are not included."""
START_LIMIT_S = 7200.0
"""Seconds that a process may take until it knows `launch.start_timeout_s`."""
_STUCK_LIMITS = 2.0
"""Time limits after which a rank that cannot even count is killed. More than one, because a job
that was paused as a whole looks the same when it continues."""


_FIRST_STEP_LIMITS = 3.0
"""Time limits that the first step may take, which compiles kernels and allocates buffers."""


def collective_limit(limit_s: float) -> timedelta:
    """Timeout of a collective for the watchdog's limit `limit_s`: longer than any action of the
    watchdog, so that its message appears and not PyTorch's."""
    longest_s = _FIRST_STEP_LIMITS * limit_s
    return timedelta(seconds=(_STUCK_LIMITS + 1) * longest_s + 2 * _TELLING_S)


@dataclass
class Heartbeat:
    """A rank's heartbeat."""

    rank: int
    pid: int
    host: str
    step: int
    """Optimizer steps done."""
    first_step: int
    """The step from which this start continued."""
    trained_s: float = 0.0
    """Seconds spent in the steps since then."""
    doing: str = ""
    marks: int = 0
    """Number of marks of the main thread."""
    where: str = ""
    """Innermost line of the main thread; only after the time limit."""
    beats: int = 0

    def write(self, folder: Path) -> None:
        """Replace this rank's file. Not fsynced: it is for ranks that run now."""
        temporary = folder / f".rank-{self.rank}.tmp"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(_file(folder, self.rank))

    @classmethod
    def read(cls, folder: Path, rank: int) -> "Heartbeat | None":
        """Read a rank's heartbeat; None without a readable one."""
        try:
            return _HEARTBEAT.validate_python(read_json(_file(folder, rank)))
        except (OSError, ValueError):
            return None


_HEARTBEAT = TypeAdapter(Heartbeat)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def replayed(last: Heartbeat | None, step: int) -> dict[str, Any] | None:
    """The steps that a run resumed at `step` has to repeat: fields of a `replay` event.

    `last`: rank 0's heartbeat before. None if nothing was lost. `seconds` is their average
    duration, including the first one's warm-up; at most one beat's steps are missing.
    """
    if last is None or last.step <= step:
        return None
    mean_s = last.trained_s / max(1, last.step - last.first_step)
    seconds = round(mean_s * (last.step - step), 3)
    return {"from_step": step, "to_step": last.step, "seconds": seconds}


class Watchdog:
    """Watches the main thread of this rank while entered; ends the process if it hangs.

    Until `at_step`, the limit is that of the start. Also answers STACKS_SIGNAL with the stacks
    of all threads, in the rank's log, and ends a rank that was asked to stop and has not exited
    `grace_s` later.
    """

    def __init__(
        self,
        run: RunDirectory,
        rank: int,
        world: int,
        stop: StopRequest,
        limit_s: float,
        start_limit_s: float,
        grace_s: float | None,
        offset: int,
    ) -> None:
        """`limit_s`: seconds without a mark, `start_limit_s`: the same before `at_step`;
        `offset`: see `events_offset`."""
        self._run = run
        self._world = world
        self._stop = stop
        self._step_limit_s, self._start_limit_s = limit_s, start_limit_s
        self._starting = True
        self._grace_s = grace_s
        self._offset = offset
        least_s = min(limit_s, start_limit_s)
        self._slow_beat_s = min(least_s / _BEATS_PER_LIMIT, LONGEST_BEAT_S)
        self._beat_s = min(self._slow_beat_s, LONGEST_BEAT_S if rank else RANK_ZERO_BEAT_S)
        self._mine = Heartbeat(rank, os.getpid(), socket.gethostname(), 0, 0)
        self._idle_s = self._stopping_s = 0.0
        """Counted in beats: a process that was frozen has not used up its time."""
        self._waiting = False
        self.before: Heartbeat | None = None
        """Rank 0's last heartbeat of the start before this one."""
        self._main = threading.get_ident()
        self._left = threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._watch, self._write)
        ]

    def at_step(self, step: int) -> None:
        """The start has ended, and the run continues from `step`."""
        self._mine.step = self._mine.first_step = step
        self._starting = False
        self.mark("starting", step)
        self._count_on()

    def __enter__(self) -> "Watchdog":
        self._run.heartbeats.mkdir(parents=True, exist_ok=True)
        self.before = Heartbeat.read(self._run.heartbeats, 0)
        if self._mine.rank == 0:
            self._claim.unlink(missing_ok=True)
        self._log = self._run.rank_log(self._mine.rank).open("a", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=self._log, all_threads=True)
        self.mark("starting", self._mine.step)
        self._beat()
        self._count_on()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join(_TELLING_S)  # One may wait for a lost disk.
        faulthandler.cancel_dump_traceback_later()
        if not self._threads[-1].is_alive():
            self._beat()
        faulthandler.unregister(STACKS_SIGNAL)
        self._log.close()

    @property
    def doing(self) -> str:
        """What the main thread began last."""
        return self._mine.doing

    @property
    def has_stepped(self) -> bool:
        """Whether this start has completed a step."""
        return self._mine.step > self._mine.first_step

    def mark(self, doing: str, step: int, trained_s: float = 0.0) -> None:
        """Mark that the main thread began or ended something: its time limit restarts."""
        self._mine.doing, self._mine.step = doing, step
        self._mine.trained_s += trained_s
        self._mine.marks += 1
        self._idle_s = 0.0
        self._waiting = False

    def hear(self, doing: str) -> None:
        """Mark a phase of `Phases.begin`. Ranks that wait for rank 0, which is watched itself,
        have no limit. Of progress in it, ranks have different amounts: it is not counted."""
        self._mine.marks -= doing == self._mine.doing
        self.mark(doing, self._mine.step)
        self._waiting = doing == WAITING and self._mine.rank != 0

    @property
    def _limit_s(self) -> float:
        """Of what the main thread does now."""
        if self._starting:
            return self._start_limit_s
        first = self._mine.step == self._mine.first_step
        return self._step_limit_s * (_FIRST_STEP_LIMITS if first else 1)

    @property
    def _claim(self) -> Path:
        """Created by the one rank (of those that share a disk) that reports the hang."""
        return self._run.heartbeats / "hang"

    def _write(self) -> None:
        while not self._left.wait(self._beat_s):
            self._beat()

    def _count_on(self) -> None:
        """Postpone the exit by faulthandler's thread."""
        limit_s = _STUCK_LIMITS * self._limit_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._log)

    def _watch(self) -> None:
        while not self._left.wait(self._beat_s):
            self._count_on()
            if not self._waiting:
                self._idle_s += self._beat_s
            if self._idle_s >= self._limit_s:
                self._end_hung()
            if self._grace_s is not None and not self._starting and self._stop.reason:
                self._stopping_s += self._beat_s
                if self._stopping_s >= self._grace_s + _LAUNCHER_GRACE_S:
                    self._end(*grace_over(self._grace_s, self._run.path, self._offset))

    def _beat(self) -> None:
        self._mine.beats += 1
        with suppress(OSError):  # A full disk is reported by the save.
            self._mine.write(self._run.heartbeats)

    def _end_hung(self) -> None:
        looking_s = _BEATS_TO_LOOK * self._slow_beat_s
        try:
            self._end_within(looking_s + 2 * _READING_S + _PAUSE_S + _TELLING_S)
            self._mine.where = _innermost(self._main)
            first = self._is_first()
            self._dump()
            if first:
                self._tell_of_hang(looking_s)
            while not self._is_told():
                time.sleep(self._beat_s)
            time.sleep(_PAUSE_S)
        finally:
            os._exit(EXIT_FAILED)

    def _end_within(self, seconds: float) -> None:
        """Exit at that time in any case."""
        faulthandler.dump_traceback_later(2 * seconds, exit=True, file=self._log)
        last_resort = threading.Timer(seconds, os._exit, (EXIT_FAILED,))
        last_resort.daemon = True
        last_resort.start()

    def _tell_of_hang(self, looking_s: float) -> None:
        """Report what all ranks are doing, and exit."""
        idle_s = self._idle_s
        before = self._all()
        time.sleep(looking_s)  # Heartbeats continue in their own thread.
        fields = diagnosis(before, self._all())
        limit = f"{self._limit_s:g} s" + " (launch.start_timeout_s)" * self._starting
        message = f"hang: nothing done for {limit}; {fields.pop('message')}"
        EventLog(self._run.events).write("hang", idle_s=round(idle_s, 3), **fields)
        self._end(f"{message}\n  the ranks' stacks are in {self._run.logs}/rank-*.log")

    def _all(self) -> dict[int, Heartbeat | None]:
        until = time.monotonic() + _READING_S
        ranks = itertools.takewhile(lambda _: time.monotonic() < until, range(self._world))
        return {rank: Heartbeat.read(self._run.heartbeats, rank) for rank in ranks}

    def _is_told(self) -> bool:
        """Whether the rank that reports the hang has done so; true where nobody can know."""
        try:
            return self._claim.stat().st_size > 0
        except OSError:
            return True

    def _is_first(self) -> bool:
        try:
            self._claim.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def _end(self, message: str, code: int = EXIT_FAILED) -> None:
        """Stacks, then the message: launchers show the end of the log."""
        try:
            self._end_within(_TELLING_S)
            self._tell(message, code)
            with suppress(OSError):
                self._claim.write_text("told")
        finally:
            os._exit(code)

    def _tell(self, message: str, code: int) -> None:
        self._dump()
        for file in (self._log, sys.stderr):
            tell(f"error: {message}", file)
        EventLog(self._run.events).write(
            "end",
            rank=self._mine.rank,
            step=self._mine.step,
            exit_code=code,
            error=message,
        )

    def _dump(self) -> None:
        with suppress(OSError):
            faulthandler.dump_traceback(self._log, all_threads=True)


def _innermost(thread: int) -> str:
    """`file.py:line function` of a thread."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def diagnosis(
    before: Mapping[int, Heartbeat | None], after: Mapping[int, Heartbeat | None]
) -> dict[str, Any]:
    """Which ranks hang, from two looks at all heartbeats: fields of a `hang` event.

    `ranks`: those whose heartbeat is stale, otherwise those that are behind the others,
    otherwise none: then all wait in the same step, and `where` distinguishes them. Ranks whose
    file is on another machine's disk are not included.
    """
    seen = {rank: beat for rank, beat in after.items() if beat is not None}
    if not seen:
        return {"message": "no heartbeat can be read", "ranks": [], "step": 0, "where": {}}
    still = [r for r, beat in seen.items() if before.get(r) == beat]
    furthest = max(beat.marks for beat in seen.values())
    behind = [rank for rank, beat in seen.items() if beat.marks < furthest]
    where = {rank: beat.where for rank, beat in seen.items() if beat.where}
    step = max(beat.step for beat in seen.values())
    if still:
        message = f"stopped or frozen: rank {', '.join(map(str, still))}"
    elif behind:
        doing = [f"rank {rank} in {seen[rank].doing}" for rank in behind]
        message = f"behind the others: {', '.join(doing)}"
    else:
        message = "all ranks live and have come as far as each other"
    waiting = [f"rank {rank} at {place}" for rank, place in where.items()]
    message += f" ({step} steps done); {', '.join(waiting)}"
    return {"message": message, "ranks": still or behind, "step": step, "where": where}
