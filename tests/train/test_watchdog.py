"""Hung ranks: found in time, named, with their stacks; healthy and slow ones left alone."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.processes import HANG_S, wait_until
from tests.warm import WarmPython
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.train.watchdog import Heartbeat, diagnosis, replayed

RANK = Path(__file__).with_name("watched_rank.py")
LIMIT_S = 5.0
"""Of a rank of the tests: some heartbeats, even where other processes keep every core busy."""
SLEEP_S = 60.0
"""How long a rank hangs that nobody ends."""
BEAT = Heartbeat(0, 10, "here", step=7, first_step=5, trained_s=3.0, marks=20, beats=5)


class Ranks:
    """Three ranks with a watchdog each."""

    def __init__(self, run: Path, behaviour: str, grace_s: float = 0) -> None:
        self.run = RunDirectory(run)
        argv = [sys.executable, str(RANK), str(run), str(LIMIT_S), str(grace_s), behaviour]
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

    def seconds_since_it_began(self) -> float:
        return time.time() - float((self.run.path / "began").read_text())

    def event(self, kind: str) -> dict[str, Any]:
        (found,) = [event for event in jsonl.read(self.run.events) if event["kind"] == kind]
        return found

    def log(self, rank: int) -> str:
        return self.run.rank_log(rank).read_text()


def test_a_stopped_rank_is_named_by_the_others_and_shows_its_stacks_when_woken(tmp_path):
    with Ranks(tmp_path, "stop@1") as ranks:
        assert ranks.codes(0, 2) == [4, 4]
        hang = ranks.event("hang")
        assert (hang["ranks"], hang["step"]) == ([1], 4)
        assert LIMIT_S <= hang["idle_s"] < SLEEP_S
        assert all("meet" in ranks.log(rank) for rank in (0, 2))
        assert "meet" in hang["where"]["0"]
        error = ranks.event("end")["error"]
        assert error.startswith("hang: nothing done for 5 s; stopped or frozen: rank 1")
        # What launchers do with a stopped rank (launchers/process.py).
        ranks.processes[1].send_signal(signal.SIGUSR2)
        ranks.processes[1].send_signal(signal.SIGCONT)
        wait_until(lambda: "misbehave" in ranks.log(1), "its stacks")


def test_a_rank_that_hangs_in_its_code_is_told_apart_by_where_it_is(tmp_path):
    with Ranks(tmp_path, "hang@2") as ranks:
        assert ranks.codes(0, 1, 2) == [4, 4, 4]
        hang = ranks.event("hang")
        assert hang["ranks"] == []
        assert "misbehave" in hang["where"]["2"]
        assert "misbehave" not in hang["where"]["0"]
        assert "misbehave" in ranks.log(2)


def test_a_rank_that_is_behind_is_named(tmp_path):
    with Ranks(tmp_path, "behind@0") as ranks:
        assert ranks.codes(0, 1, 2) == [4, 4, 4]
        assert ranks.event("hang")["ranks"] == [0]
        assert "behind the others: rank 0" in ranks.event("end")["error"]


def test_a_rank_that_keeps_the_interpreters_lock_is_ended(tmp_path):
    """None of its Python threads runs then."""
    with Ranks(tmp_path, "lock@1") as ranks:
        assert ranks.codes(0, 1, 2) == [4, 1, 4]
        assert ranks.event("hang")["ranks"] == [1]
        assert "misbehave" in ranks.log(1)


@pytest.mark.parametrize("behaviour", ["disk@1", "broken@1"])
def test_nothing_keeps_a_hung_rank_from_ending(tmp_path, behaviour):
    with Ranks(tmp_path, behaviour) as ranks:
        assert ranks.codes(1) == [4]
        assert ranks.codes(0, 2) == [4, 4]


def test_a_rank_that_waits_for_one_that_is_watched_has_no_limit(tmp_path):
    with Ranks(tmp_path, "wait@1") as ranks:
        assert ranks.codes(0, 1, 2) == [0, 0, 0]


def test_slow_steps_within_the_limit_are_no_hang(tmp_path):
    with Ranks(tmp_path, "slow@1") as ranks:
        assert ranks.codes(0, 1, 2) == [0, 0, 0]
        assert not ranks.run.events.exists()
        last = Heartbeat.read(ranks.run.heartbeats, 2)
        assert last is not None
        assert (last.step, last.first_step) == (10, 0)
        assert last.trained_s == pytest.approx(0.5)


def test_a_rank_that_hangs_before_the_first_step_is_named(tmp_path):
    with Ranks(tmp_path, "begin@1") as ranks:
        assert ranks.codes(0, 1, 2) == [4, 4, 4]
        assert "misbehave" in ranks.event("hang")["where"]["1"]
        assert "nothing done for 5 s (launch.start_timeout_s); " in ranks.event("end")["error"]


def test_a_hang_is_told_although_heartbeats_are_read_slowly(tmp_path):
    """As those of a thousand ranks are."""
    with Ranks(tmp_path, "reading@1") as ranks:
        assert ranks.codes(0, 1, 2) == [4, 4, 4]
        assert ranks.event("hang")["ranks"] == []
        assert ranks.event("end")["error"].startswith("hang: nothing done for 5 s; ")
        assert "misbehave" in ranks.log(1)


@pytest.mark.parametrize("damaged", ["[]", "5", '{"rank": 0}', '"x"'])
def test_a_damaged_heartbeat_is_none(tmp_path, damaged):
    Heartbeat(0, 1, "host", step=5, first_step=0).write(tmp_path)
    file = tmp_path / "rank-0.json"
    assert Heartbeat.read(tmp_path, 0).step == 5
    file.write_text(file.read_text().replace('"step": 5', '"step": "x"'))
    assert Heartbeat.read(tmp_path, 0) is None
    file.write_text(damaged)
    assert Heartbeat.read(tmp_path, 0) is None


def test_the_first_step_may_take_longer(tmp_path):
    with Ranks(tmp_path, "compile@1") as ranks:
        assert ranks.codes(0, 1, 2) == [0, 0, 0]
        assert not ranks.run.events.exists()


def test_a_job_that_was_paused_as_a_whole_goes_on(tmp_path):
    """A scheduler that suspends a job stops all its processes."""
    with Ranks(tmp_path, "slow@1") as ranks:
        wait_until((tmp_path / "began").exists, "the fifth step")
        for process in ranks.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * LIMIT_S)
        for process in ranks.processes:
            process.send_signal(signal.SIGCONT)
        assert ranks.codes(0, 1, 2) == [0, 0, 0]


def test_the_grace_of_a_rank_that_was_asked_to_stop(tmp_path):
    with Ranks(tmp_path, "signal@1", grace_s=0.5) as ranks:
        assert ranks.codes(1) == [4]
        assert 0.5 < ranks.seconds_since_it_began() < SLEEP_S
        assert ranks.event("end")["error"] == (
            "not saved and gone within launch.grace_s (0.5 s): killed"
        )
        assert "misbehave" in ranks.log(1)


def test_a_heartbeat_that_changes_is_alive_and_one_that_is_missing_unknown():
    before = {0: BEAT, 1: replace(BEAT, rank=1), 2: None}
    after = {0: replace(BEAT, beats=6), 1: replace(BEAT, rank=1), 2: None}
    assert diagnosis(before, after)["ranks"] == [1]


def test_no_heartbeat_at_all():
    nothing = {0: None, 1: None}
    assert diagnosis(nothing, nothing)["message"] == "no heartbeat can be read"
    assert diagnosis({}, {0: BEAT})["ranks"] == []


def test_what_is_done_again_after_a_death():
    assert replayed(None, 5) is None, "no heartbeat"
    assert replayed(BEAT, 6) == {"from_step": 6, "to_step": 7, "seconds": 1.5}
    assert replayed(BEAT, 7) is None, "nothing lost"
