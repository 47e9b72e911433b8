"""Phases of a rank outside training steps: for the terminal, events.jsonl and the watchdog.

A rank reports its phase by `Phases.begin`. The watchdog gets every call; the phases of rank 0
before the first step and after the last are displayed: on a terminal in one line, with a bar if
there is a total, in a log file with a line for each long phase.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from toolkit.data.progress import Item
from toolkit.layout import Layout
from toolkit.models.weights import WeightSource, checkpoint_names
from toolkit.run.events import process_age_s
from toolkit.text.terminal import printable, tell
from toolkit.text.units import duration

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.models.families.tensors import Block

Mark = Callable[[str], object]
"""Reports what a rank begins: `Phases.begin`. The watchdog's time limit restarts."""
Tick = Callable[[int], None]
"""Takes the amount that was done since the last call."""

NOTICEABLE_S = 1.0
"""In a log file, a phase that lasts longer gets a line, written at that time, not at its
end."""
_REFRESH_S = 0.1
LIBRARIES, WAITING = "loading the libraries", "waiting for the other ranks"
BUILDING = "building the model"


class Phases:
    """The phases of one rank; a context manager. Ranks other than 0 show nothing."""

    def __init__(self, rank: int, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)
        self.seconds = {LIBRARIES: process_age_s()}
        """How long each phase took, of those that were shown."""
        self.heard: Mark = lambda _: None
        """Also gets the arguments of `begin`, again with every tick."""
        self.last = ""
        """The phase that this rank began last, whether shown or not."""
        self._leader = rank == 0
        self._shown = False
        self._doing, self._began = "", 0.0
        self._bar: Progress | None = None
        self._line: threading.Timer | None = None

    def __enter__(self) -> "Phases":
        self.show()
        return self

    def __exit__(self, *error: object) -> None:
        self.hide()

    def show(self) -> None:
        """Show the phases that begin from now on."""
        self._shown = self._leader
        if self._leader and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TaskProgressColumn(text_format_no_percentage=""),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            # A rank that is killed here cannot restore the cursor.
            self.console.show_cursor(True)

    def hide(self) -> None:
        """End the current phase and release the terminal."""
        self._end()
        self._shown = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, doing: str, total: int | None = None) -> Tick:
        """Begin a phase with a total amount; call the result with the amounts done."""
        self.heard(doing)
        self.last = doing
        done, refreshed, bar = 0, 0.0, self._bar
        if self._shown:
            self._end()
            self._doing, self._began = doing, time.monotonic()
            self._write_line_if_it_lasts()
        if bar is not None:
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(printable(doing), total=total)

        def tick(amount: int) -> None:
            nonlocal done, refreshed
            self.heard(doing)
            done += amount
            if bar is not None and (now := time.monotonic()) - refreshed > _REFRESH_S:
                refreshed = now
                bar.update(task, completed=done)

        return tick

    def _write_line_if_it_lasts(self) -> None:
        if self._bar is None:
            self._line = threading.Timer(NOTICEABLE_S, tell, (self._doing, self.console.file))
            self._line.daemon = True
            self._line.start()

    def _end(self) -> None:
        if self._line is not None:
            self._line.cancel()
            self._line = None
        if self._doing:
            lasted = time.monotonic() - self._began
            self.seconds[self._doing] = self.seconds.get(self._doing, 0.0) + lasted
            self._doing = ""

    def track(self, items: Iterable[Item], title: str, total: int | None) -> Iterator[Item]:
        """Iterate over the `items` as a phase."""
        tick = self.begin(title, total)
        for item in items:
            yield item
            tick(1)

    def summary(self) -> str:
        """One line: how long all of them took, and each that took a tenth of a second."""
        parts = [f"{doing} {duration(s)}" for doing, s in self.seconds.items() if s >= 0.1]
        return f"ready after {duration(sum(self.seconds.values()))}: {', '.join(parts)}"


class CountedWeights(WeightSource):
    """A `WeightSource` whose tensors are counted while a model is filled from it."""

    def __init__(
        self, source: WeightSource, doing: str, layout: Layout, phases: Phases
    ) -> None:
        self._source = source
        self._doing = doing
        self._whole = layout.pp == layout.ep == 1
        """Whether a rank reads some of every tensor; otherwise the number is unknown."""
        self._phases = phases
        self._seen: set[str] = set()
        self._total: int | None = None
        self._tick: Tick = lambda _: None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes

    def read(self, name: str, start: int, stop: int) -> "Tensor":
        if not self._seen:
            self._begin(len(self.shapes))
        return self._counted(name, self._source.read(name, start, stop))

    def read_block(self, block: "Block") -> "Tensor":
        if not self._seen:
            self._begin(sum(len(checkpoint_names(*shape)) for shape in self.shapes.items()))
        return self._counted(block.tensor, self._source.read_block(block))

    def _begin(self, tensors: int) -> None:
        self._total = tensors if self._whole else None
        self._tick = self._phases.begin(self._doing, self._total)

    def _counted(self, name: str, values: "Tensor") -> "Tensor":
        if name not in self._seen:
            self._seen.add(name)
            self._tick(1)
            if len(self._seen) == self._total:
                self._phases.begin(BUILDING)
        return values
