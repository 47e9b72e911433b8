"""Where a run slowed down, and which rank is named for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.logs import KILLED_AND_RESTARTED, metrics, write_run
from toolkit.report.record import read_record
from toolkit.report.stragglers import SlowDown, slow_down


def slowed(steps: int = 800, at: int = 400, every: int = 10) -> list[dict[str, Any]]:
    """Steps of 2 s, and of 4 s behind step `at`; every ninth one is slow by chance."""
    lines = metrics(steps, 2.0, every)
    for index, line in enumerate(lines):
        line["step_time_s"] = (4.0 if line["step"] > at else 2.0) + 0.01 * (index % 3)
        if index % 9 == 0:
            line["step_time_s"] *= 3
    return lines


def waits(run: Path, *, rank: int, what: str, late_s: float, behind: int) -> None:
    (run / "ranks").mkdir(exist_ok=True)
    for one in range(4):
        lines = []
        for line in slowed():
            own = {"data_wait_s": 0.01, "core_wait_s": 0.02 + 0.001 * one}
            if rank in (one, -1) and line["step"] > behind:
                own[what] = late_s
            lines.append(json.dumps({"step": line["step"], **own}) + "\n")
        (run / f"ranks/rank-{one}.jsonl").write_text("".join(lines))


def pace_of(run: Path) -> list[str]:
    return read_record(run).pace


def test_the_step_is_found() -> None:
    assert slow_down(slowed()) == SlowDown(400, pytest.approx(2.01), pytest.approx(4.01))
    assert slow_down(metrics(800, 2.0, 10)) is None
    assert slow_down(slowed(at=0)) is None, "slow from the start: there is no before"
    assert slow_down(slowed()[:3]) is None


@pytest.mark.parametrize(
    ("what", "words"),
    [("data_wait_s", "waited for data"), ("core_wait_s", "waited for a core")],
)
def test_the_rank_is_named(tmp_path: Path, what: str, words: str) -> None:
    run = write_run(tmp_path / "run", KILLED_AND_RESTARTED[:2], slowed())
    said = "after step 400 steps took 2.0× as long (4.01 s instead of 2.01 s)"
    assert pace_of(run) == [f"{said}; what ranks waited for was not recorded"]
    waits(run, rank=3, what=what, late_s=1.9, behind=400)
    (found,) = pace_of(run)
    assert found.startswith(f"{said}: rank 3 {words}, 1.9 s per step, 0.0")
    waits(run, rank=-1, what=what, late_s=1.9, behind=400)
    (found,) = pace_of(run)
    assert found.startswith(f"{said}: ranks {words}, rank ")
    waits(run, rank=3, what=what, late_s=0.03, behind=400)
    whose = "none of the 4 ranks whose waits are known"
    reason = f"{whose} waited long enough for data or a core to explain it"
    assert pace_of(run) == [f"{said}; {reason}"]


def test_a_straggler_in_a_run_of_even_pace(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", KILLED_AND_RESTARTED[:2], metrics(800, 2.0, 10))
    waits(run, rank=2, what="core_wait_s", late_s=0.5, behind=0)
    (found,) = pace_of(run)
    assert found == "rank 2 waited for a core, 0.5 s per step, longer than the others (0.021 s)"
    waits(run, rank=2, what="core_wait_s", late_s=0.1, behind=0)
    assert pace_of(run) == []


def test_foreign_lines(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", KILLED_AND_RESTARTED[:2], slowed())
    waits(run, rank=3, what="data_wait_s", late_s=1.9, behind=400)
    with (run / "ranks/rank-3.jsonl").open("a") as file:
        file.write('{"step": "x", "data_wait_s": {}}\n[]\n{"step": 810, "data_w')
    (run / "ranks/rank-x.jsonl").write_text("{}\n")
    record = read_record(run)
    assert "rank 3 waited for data, 1.9 s" in record.pace[0]
    assert any("rank-3.jsonl: its last line is cut short" in one for one in record.missing)
