"""Marks of a rank: what it does, from the process's first line to its last, and time limits.

A rank marks what it begins with `Marks.begin`. Rank 0 shows the phases of its start and end.
Without a mark within the time limit a rank writes one `hang` event and its stacks, and ends.
The rank whose event is the first reads all of them and reports who is behind.

Nothing that blocks keeps a rank from ending: one thread counts the time, and one of
faulthandler's, which needs no interpreter, ends the process if the counting stops (C code that
holds the interpreter's lock). Time is counted in beats: a process that was paused has not used
it up.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from toolkit.data.progress import Item
from toolkit.errors import EXIT_FAILED
from toolkit.models.weights import WeightSource
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog, hang_of, process_age_s
from toolkit.system.handlers import STACKS_SIGNAL
from toolkit.text.terminal import printable, tell
from toolkit.text.units import duration

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.models.families.tensors import Block

Mark = Callable[[str], object]
"""Reports what a rank begins: `Marks.begin`. Its time limit restarts."""
Tick = Callable[[int], None]
"""Takes the amount that was done since the last call."""

NOTICEABLE_S = 1.0
"""In a log file, a phase that lasts longer gets a line, written at that time, not at its
end."""
LIBRARIES, WAITING = "loading the libraries", "waiting for the other ranks"

START_LIMIT_S = 7200.0
"""Seconds without progress that a process may take before the first step."""
_LONGEST_BEAT_S = 1.0
_BEATS_PER_LIMIT = 20
_LONGEST_LOOK_S = 10.0
"""Time between two looks at the events of the other ranks."""
_JOINING_SHARE = 0.25
"""Share of the limit after which a rank also reports a hang that another one has reported."""
_FIRST_STEP_LIMITS = 3.0
"""Time limits that the first step may take, which compiles kernels and allocates buffers."""
_STUCK_LIMITS = 2.0
"""Time limits after which a rank that cannot even count is killed. More than one, because a job
that was paused as a whole looks the same when it continues."""
_PAUSE_S = 1.0
"""How much later than the rank with the message the others exit: the first message is shown."""
_TELLING_S = 10.0
"""Time that an ending rank may take for each file that it writes: the disk may hang."""
FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Variables that let torch remember NCCL's last collectives."""


def collective_limit(limit_s: float) -> timedelta:
    """Timeout of a collective for the time limit `limit_s`: longer than any action here, so
    that our message appears and not PyTorch's."""
    longest_s = _FIRST_STEP_LIMITS * limit_s
    return timedelta(seconds=(_STUCK_LIMITS + 1) * longest_s + 2 * _TELLING_S)


class Marks:
    """What one rank does. A context manager of what is shown, which only rank 0 does.

    Also answers STACKS_SIGNAL with the stacks of all threads, in the rank's log.
    """

    def __init__(self, rank: int, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)
        self.seconds = {LIBRARIES: process_age_s()}
        """How long each phase took, of those that were shown."""
        self.doing = LIBRARIES
        """What this rank began last, whether shown or not."""
        self.step = self.first_step = 0
        """Optimizer steps done, and those done when this start began."""
        self._rank = rank
        self._display = _Display(self.console, self.seconds, shows=rank == 0)
        self._count = 0
        """Marks of something else than before: ranks that have as many are equally far."""
        self._idle_s = 0.0
        self._run: RunDirectory | None = None
        """Where a hang is reported. None until `watch`."""
        self._world = 1
        self._events: EventLog | None = None
        self._step_limit_s = START_LIMIT_S
        self._starting = True
        self._log: IO[str] = sys.__stderr__ or sys.stderr
        self._main = threading.get_ident()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="time limits")

    def __enter__(self) -> "Marks":
        self.show()
        self._postpone()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.hide()

    def close(self) -> None:
        """End the time limits. A rank that cannot exit hangs, too: last of all."""
        self._left.set()
        self._thread.join(_TELLING_S)
        faulthandler.cancel_dump_traceback_later()
        if self._run is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            self._log.close()

    def watch(self, run: RunDirectory, world: int, limit_s: float, events: EventLog) -> None:
        """Take the time limit of a run's steps, and report in its files from now on.

        `limit_s` is `launch.hang_timeout_s`.
        """
        run.logs.mkdir(parents=True, exist_ok=True)
        self._log = run.rank_log(self._rank).open("a", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=self._log, all_threads=True)
        self._world, self._events = world, events
        self._step_limit_s = limit_s
        self._run = run
        self._postpone()

    def at_step(self, step: int) -> None:
        """The start has ended, and the run continues from `step`."""
        self.first_step = step
        self._starting = False
        self.begin("starting", step=step)
        self._postpone()

    @property
    def has_stepped(self) -> bool:
        """Whether this start has completed a step."""
        return self.step > self.first_step

    def begin(self, doing: str, total: int | None = None, *, step: int | None = None) -> Tick:
        """Mark what the rank begins, after `step` steps: its time limit restarts.

        Until `hide` it is shown as a phase with a total amount. Call the result with the
        amounts done.
        """
        self.step = self.step if step is None else step
        self._hear(doing)
        progress = self._display.begin(doing, total)

        def tick(amount: int) -> None:
            self._hear(doing)
            progress(amount)

        return tick

    def _hear(self, doing: str) -> None:
        """Restart the time limit. Progress in what is done already does not count: ranks have
        different amounts of it."""
        self._count += doing != self.doing
        self.doing = doing
        self._idle_s = 0.0

    def track(self, items: Iterable[Item], title: str) -> Iterator[Item]:
        """Iterate over the `items` as a phase."""
        tick = self.begin(title)
        for item in items:
            yield item
            tick(1)

    def show(self) -> None:
        """Show the phases that begin from now on."""
        self._display.open()

    def hide(self) -> None:
        """End the current phase and release the terminal."""
        self._display.close()

    def summary(self) -> str:
        """One line: how long all of them took, and each that took a tenth of a second."""
        parts = [f"{doing} {duration(s)}" for doing, s in self.seconds.items() if s >= 0.1]
        return f"ready after {duration(sum(self.seconds.values()))}: {', '.join(parts)}"

    @property
    def _limit_s(self) -> float:
        """Limit of what the rank does now."""
        if self._starting:
            return START_LIMIT_S
        return self._step_limit_s * (1 if self.has_stepped else _FIRST_STEP_LIMITS)

    def _every_s(self, longest_s: float) -> float:
        """Time between two beats, or looks: short against the limit."""
        return min(self._limit_s / _BEATS_PER_LIMIT, longest_s)

    def _postpone(self) -> None:
        """Postpone the exit by faulthandler's thread."""
        limit_s = _STUCK_LIMITS * self._limit_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._log)

    def _watch(self) -> None:
        looked_s = 0.0
        while not self._left.wait(beat_s := self._every_s(_LONGEST_BEAT_S)):
            self._postpone()
            self._idle_s += beat_s
            looked_s += beat_s
            # Ranks that wait for rank 0, which has a limit itself, have none.
            waits = self.doing == WAITING and self._rank != 0
            if self._idle_s >= self._limit_s and not waits:
                self._end_hung()
            joins = self._idle_s >= _JOINING_SHARE * self._limit_s
            if joins and looked_s >= self._every_s(_LONGEST_LOOK_S):
                looked_s = 0.0
                if self._hangs():
                    self._end_hung()

    def _hangs(self) -> list[dict[str, Any]]:
        """The `hang` events of this start."""
        with suppress(OSError):
            events = self._events.new() if self._events else []
            return [event for event in events if event.get("kind") == "hang"]
        return []

    def _end_hung(self) -> None:
        """Write the event, then the stacks. The first rank names the hung ones when the others
        have had time to write theirs. Launchers show the end of the log, which is its message.
        """
        pause_s = 3 * self._every_s(_LONGEST_LOOK_S) + _PAUSE_S
        limit = f"{self._limit_s:g} s" + " at the start" * self._starting
        try:
            self._end_within(pause_s + 2 * _TELLING_S)
            self._write(
                "hang", doing=self.doing, where=_innermost(self._main), marks=self._count,
                idle_s=round(self._idle_s, 3),
            )  # fmt: skip
            self._dump()
            time.sleep(pause_s)
            hangs = self._hangs()
            if hangs and hangs[0].get("rank") != self._rank:
                time.sleep(2 * _PAUSE_S)
                return
            message = f"hang: nothing done for {limit}{self._who(hangs)}"
            for file in dict.fromkeys((self._log, sys.stderr)):
                tell(f"error: {message}", file)
            self._write("end", exit_code=EXIT_FAILED, error=message)
        finally:
            os._exit(EXIT_FAILED)

    def _who(self, hangs: list[dict[str, Any]]) -> str:
        """Which ranks hang, as far as their files are on this machine's disk."""
        run = self._run
        if run is None or not hangs:
            return f" in {self.doing}"
        near = [rank for rank in range(self._world) if run.rank_log(rank).exists()]
        stacks = f"\n  the ranks' stacks are in {run.logs}/rank-*.log"
        if list(run.logs.glob("nccl_trace_rank_*")):
            stacks += f", their collectives: torchfrtrace {run.logs}"
        _, message = hang_of(hangs, near)
        return f"; {message}{stacks}"

    def _end_within(self, seconds: float) -> None:
        """Exit at that time in any case."""
        faulthandler.dump_traceback_later(2 * seconds, exit=True, file=self._log)
        last_resort = threading.Timer(seconds, os._exit, (EXIT_FAILED,))
        last_resort.daemon = True
        last_resort.start()

    def _write(self, kind: Any, **fields: Any) -> None:
        if self._events is not None:
            self._events.write(kind, rank=self._rank, step=self.step, **fields)

    def _dump(self) -> None:
        """Write the stacks, and NCCL's last collectives where it has any."""
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(self._log, all_threads=True)
        collectives: Any = sys.modules.get("torch._C._distributed_c10d")
        if self._run is not None and hasattr(collectives, "_dump_nccl_trace"):
            with suppress(Exception):
                file = self._run.logs / f"nccl_trace_rank_{self._rank}"
                file.write_bytes(collectives._dump_nccl_trace())


def _innermost(thread: int) -> str:
    """`file.py:line function` of a thread."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


class _Display:
    """The phases on the terminal in one line, in a log file a line for each long one."""

    def __init__(self, console: Console, seconds: dict[str, float], *, shows: bool) -> None:
        self._console, self._seconds, self._shows = console, seconds, shows
        self._doing, self._began = "", 0.0
        self._bar: Progress | None = None
        """While phases are shown. In a log file it draws nothing."""
        self._line: threading.Timer | None = None

    def open(self) -> None:
        if not self._shows:
            return
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(text_format_no_percentage=""),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar.start()
        # A rank that is killed here cannot restore the cursor.
        self._console.show_cursor(True)

    def close(self) -> None:
        self._end()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, doing: str, total: int | None) -> Tick:
        bar = self._bar
        if bar is None:
            return lambda _: None
        self._end()
        self._doing, self._began = doing, time.monotonic()
        if not self._console.is_terminal:
            self._line = threading.Timer(NOTICEABLE_S, tell, (doing, self._console.file))
            self._line.daemon = True
            self._line.start()
        for earlier in bar.task_ids:
            bar.update(earlier, visible=False)
        return partial(bar.advance, bar.add_task(printable(doing), total=total))

    def _end(self) -> None:
        if self._line is not None:
            self._line.cancel()
            self._line = None
        if self._doing:
            lasted = time.monotonic() - self._began
            self._seconds[self._doing] = self._seconds.get(self._doing, 0.0) + lasted
            self._doing = ""


class CountedWeights(WeightSource):
    """A `WeightSource` that calls `tick` for each part of a tensor that is read from it."""

    def __init__(self, source: WeightSource, tick: Tick) -> None:
        self._source = source
        self._tick = tick

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes

    def read(self, name: str, start: int, stop: int) -> "Tensor":
        self._tick(1)
        return self._source.read(name, start, stop)

    def read_block(self, block: "Block") -> "Tensor":
        self._tick(1)
        return self._source.read_block(block)
