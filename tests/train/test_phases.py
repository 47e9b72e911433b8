"""The phases of a start: one account for people, for events.jsonl and for the time limits."""

import io
import re
from contextlib import closing
from types import SimpleNamespace

from rich.console import Console

from tests.processes import wait_until
from toolkit.train import watchdog as module
from toolkit.train.watchdog import CountedWeights, Marks

CURSOR = re.compile(r"\x1b\[\?25([hl])")


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)


def printed(phases: Marks) -> str:
    assert isinstance(phases.console.file, io.StringIO)
    return phases.console.file.getvalue()


def test_a_log_file_has_a_line_for_a_phase_that_lasts(monkeypatch):
    phases = Marks(0, Console(file=io.StringIO()))
    monkeypatch.setattr(module, "NOTICEABLE_S", 3600)
    with closing(phases), phases:
        phases.begin("reading the data")
        monkeypatch.setattr(module, "NOTICEABLE_S", 0)
        phases.begin("tokenising", 40)(1)
        wait_until(lambda: "\n" in printed(phases), "a line")
    assert printed(phases) == "tokenising\n", "while it goes on, and not what was quick"


def test_a_terminal_has_a_bar_where_there_is_a_total_and_nothing_is_left():
    phases = Marks(0, terminal())
    with closing(phases), phases:
        phases.begin("reading the data")
        phases.begin("hashing [red]\x1b[8m.bin", 8)(2)
        wait_until(lambda: "25%" in printed(phases), "a quarter")
        assert CURSOR.findall(printed(phases))[-1] == "h", "a killed rank hides no cursor"
    shown = printed(phases)
    assert "reading the data" in shown
    assert r"hashing [red]\x1b[8m.bin" in shown, "as it stands, escaped"
    assert shown.endswith("\x1b[1A\x1b[2K"), "the line is taken back"


def test_a_phase_that_has_ended_may_still_be_counted():
    """Weights are read in later phases than the one that began with them."""
    phases = Marks(0, terminal())
    with closing(phases), phases:
        tick = phases.begin("building the model")
        phases.begin("waiting for the other ranks")
        tick(1)


def test_what_is_done_of_a_phase_restarts_the_time_limit():
    for rank in (0, 1):
        marks = Marks(rank, Console(file=io.StringIO()))
        tick = marks.begin("exporting", 100)
        marks._idle_s, count = 5.0, marks._count
        tick(10)
        assert (marks._idle_s, marks._count) == (0.0, count), "shown or not, on every rank"
        assert printed(marks) == ""


def test_reading_weights_is_progress():
    ticks: list[int] = []
    shapes = {"embed.weight": (4, 2)}
    source = SimpleNamespace(shapes=shapes, read=lambda *part: part, read_block=lambda b: b)
    weights = CountedWeights(source, ticks.append)
    assert weights.read("embed.weight", 0, 8) == ("embed.weight", 0, 8)
    assert (weights.read_block("block"), weights.shapes, ticks) == ("block", shapes, [1, 1])
