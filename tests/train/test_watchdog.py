"""Marks of a rank: phases that are shown. Hung ranks are found in time, and named with their
stacks; healthy and slow ones are left alone."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.processes import HANG_S, wait_until
from tests.warm import WarmPython
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import hang_of
from toolkit.train import watchdog as module
from toolkit.train.watchdog import CountedWeights, Marks

RANK = Path(__file__).with_name("watched_rank.py")
LIMIT_S = 5.0
"""Of a rank of the tests: some beats, even where other processes keep every core busy."""
SLEEP_S = 60.0
"""How long a rank hangs that nobody ends."""


class Ranks:
    """Three ranks with time limits."""

    def __init__(self, run: Path, behaviour: str) -> None:
        self.run = RunDirectory(run)
        argv = [sys.executable, str(RANK), str(run), str(LIMIT_S), behaviour]
        self.processes = [
            WarmPython(
                argv,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3"},
                stdin=subprocess.DEVNULL,
            )
            for rank in range(3)
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def codes(self, *ranks: int) -> list[int]:
        return [self.processes[rank].wait(HANG_S) for rank in ranks]

    def error(self) -> str:
        (end,) = [event for event in jsonl.read(self.run.events) if event["kind"] == "end"]
        return str(end["error"])

    def hangs(self) -> dict[int, dict[str, Any]]:
        """The event of each rank, which has one at most."""
        events = [event for event in jsonl.read(self.run.events) if event["kind"] == "hang"]
        found = {event["rank"]: event for event in events}
        assert len(found) == len(events)
        return found

    def hung(self) -> list[int]:
        return hang_of([*self.hangs().values()], range(3))[0]

    def log(self, rank: int) -> str:
        return self.run.rank_log(rank).read_text()


def test_a_stopped_rank_is_named_by_the_others_and_shows_its_stacks_when_woken(tmp_path):
    with Ranks(tmp_path, "stop@1") as ranks:
        assert ranks.codes(0, 2) == [4, 4]
        hangs = ranks.hangs()
        assert (ranks.hung(), hangs[0]["step"]) == ([1], 4)
        assert LIMIT_S <= max(event["idle_s"] for event in hangs.values()) < SLEEP_S
        assert all("meet" in ranks.log(rank) for rank in (0, 2))
        assert "meet" in hangs[0]["where"]
        error = ranks.error()
        assert error.startswith("hang: nothing done for 5 s; stopped or frozen: rank 1")
        # What launchers do with a stopped rank (launchers/process.py).
        ranks.processes[1].send_signal(signal.SIGUSR2)
        ranks.processes[1].send_signal(signal.SIGCONT)
        wait_until(lambda: "misbehave" in ranks.log(1), "its stacks")


def test_a_rank_that_hangs_in_its_code_is_told_apart_by_where_it_is(tmp_path):
    with Ranks(tmp_path, "hang@2") as ranks:
        assert ranks.codes(0, 1, 2) == [4, 4, 4]
        assert ranks.hung() == []
        assert "misbehave" in ranks.hangs()[2]["where"]
        assert "misbehave" not in ranks.hangs()[0]["where"]
        assert "misbehave" in ranks.log(2)


def test_a_rank_that_is_behind_is_named(tmp_path):
    with Ranks(tmp_path, "behind@0") as ranks:
        assert ranks.codes(0, 1, 2) == [4, 4, 4]
        assert ranks.hung() == [0]
        assert "behind the others: rank 0" in ranks.error()


def test_a_rank_that_keeps_the_interpreters_lock_is_ended(tmp_path):
    """None of its Python threads runs then."""
    with Ranks(tmp_path, "lock@1") as ranks:
        assert ranks.codes(0, 1, 2) == [4, 1, 4]
        assert ranks.hung() == [1]
        assert "misbehave" in ranks.log(1)


@pytest.mark.parametrize("behaviour", ["disk@1", "broken@1"])
def test_nothing_keeps_a_hung_rank_from_ending(tmp_path, behaviour):
    with Ranks(tmp_path, behaviour) as ranks:
        assert ranks.codes(1) == [4]
        assert ranks.codes(0, 2) == [4, 4]


def test_a_rank_that_waits_for_one_that_is_watched_has_no_limit(tmp_path):
    with Ranks(tmp_path, "wait@1") as ranks:
        assert ranks.codes(0, 1, 2) == [0, 0, 0]


def test_a_rank_that_hangs_before_the_first_step_is_named(tmp_path):
    with Ranks(tmp_path, "begin@1") as ranks:
        assert ranks.codes(0, 1, 2) == [4, 4, 4]
        assert "misbehave" in ranks.hangs()[1]["where"]
        assert "nothing done for 5 s at the start; " in ranks.error()


def test_the_first_step_may_take_longer(tmp_path):
    with Ranks(tmp_path, "compile@1") as ranks:
        assert ranks.codes(0, 1, 2) == [0, 0, 0]
        assert not ranks.run.events.exists()


def test_slow_steps_and_a_pause_of_the_whole_job_are_no_hang(tmp_path):
    """A scheduler that suspends a job stops all its processes."""
    with Ranks(tmp_path, "slow@1") as ranks:
        wait_until((tmp_path / "began").exists, "the fifth step")
        for process in ranks.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * LIMIT_S)
        for process in ranks.processes:
            process.send_signal(signal.SIGCONT)
        assert ranks.codes(0, 1, 2) == [0, 0, 0]
        assert not ranks.run.events.exists()


def test_a_hang_of_a_thousand_ranks_has_a_word(tmp_path):
    """Every rank but one wrote its event; one reads them all."""
    events = [
        {"kind": "hang", "rank": rank, "step": 7, "marks": 20, "where": "c10d.py:3 all_reduce"}
        for rank in range(1024)
        if rank != 700
    ]
    for event in reversed(events):
        jsonl.append(RunDirectory(tmp_path).events, event)
    began = time.monotonic()
    hung, message = hang_of(jsonl.read(RunDirectory(tmp_path).events), range(1024))
    assert time.monotonic() - began < 5
    assert hung == [700]
    assert message == (
        "stopped or frozen: rank 700 (7 steps done); "
        "rank 0, 1, 2, 3, 4, 5, 6, 7 and 1015 more at c10d.py:3 all_reduce"
    )
    events[3]["marks"] = 19
    assert hang_of(events, range(8))[0] == [3]
    assert hang_of([], range(2))[0] == [0, 1]


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
