"""What a rank waited for by itself: a core that others take, and the lines of a resumed run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.track import rank_logs
from toolkit.track.rank_logs import RankWaits, SampleLog, core_wait_s


def compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.skipif(core_wait_s() is None, reason="this system does not record it")
def test_a_core_that_is_taken(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = [sys.executable, "-c", "while True: pass"]
    hog = subprocess.Popen(busy)  # on the same core
    try:
        waits = RankWaits(RunDirectory(tmp_path), 3)
        compute(1.0)
        waits.write(10, [0.05] * 10)
        time.sleep(0.5)
        waits.write(20, [0.0] * 10)
    finally:
        os.sched_setaffinity(0, cores)
        hog.kill()
        hog.wait()
    computing, sleeping = jsonl.read(tmp_path / "ranks/rank-3.jsonl")
    assert (computing["step"], computing["data_wait_s"]) == (10, 0.05)
    assert computing["core_wait_s"] > 0.02, "0.5 s of 1 s, in 10 steps"
    assert sleeping["core_wait_s"] < computing["core_wait_s"], "sleeping is no wait"


def test_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_logs, "_SCHEDULER", tmp_path / "missing")
    run = RunDirectory(tmp_path)
    waits = RankWaits(run, 0)
    for step in (10, 20, 30):
        waits.write(step, [0.01] * 10)
    jsonl.drop_later_steps_of_ranks(run.ranks, 20)
    lines = jsonl.read(tmp_path / "ranks/rank-0.jsonl")
    assert [line["step"] for line in lines] == [10, 20]
    assert lines[0]["core_wait_s"] is None, "not known is not zero"


def test_later_steps_of_every_rank_go(tmp_path: Path) -> None:
    """Also of ranks that the resumed run has no more: their shares are dealt anew."""
    run = RunDirectory(tmp_path)
    for rank in range(4):
        log = SampleLog(run, rank, data_rank=rank // 2)
        for step in range(1, 6):
            log.write(step, [10 * step + rank // 2])
    jsonl.drop_later_steps_of_ranks(run.samples, 3)
    for rank in range(4):
        lines = jsonl.read(run.samples / f"rank-{rank}.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert lines[-1] == {"step": 3, "data_rank": rank // 2, "samples": [30 + rank // 2]}


def test_without_a_log_there_is_nothing_to_drop(tmp_path: Path) -> None:
    jsonl.drop_later_steps_of_ranks(RunDirectory(tmp_path).samples, 3)
    assert list(tmp_path.iterdir()) == []
