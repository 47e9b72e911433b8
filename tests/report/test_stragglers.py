"""The rank that is named for holding up the others."""

import json
from pathlib import Path

from tests.report.logs import KILLED_AND_RESTARTED, metrics, write_run
from toolkit.report.record import read_record


def waits(run: Path, *, rank: int, what: str, late_s: float) -> None:
    (run / "ranks").mkdir(exist_ok=True)
    for one in range(4):
        lines = []
        for line in metrics(800, 2.0, 10):
            own = {"data_wait_s": 0.01, "core_wait_s": 0.02 + 0.001 * one}
            if rank == one:
                own[what] = late_s
            lines.append(json.dumps({"step": line["step"], **own}) + "\n")
        (run / f"ranks/rank-{one}.jsonl").write_text("".join(lines))


def pace_of(run: Path) -> list[str]:
    return read_record(run).pace


def test_the_rank_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", KILLED_AND_RESTARTED[:2], metrics(800, 2.0, 10))
    waits(run, rank=2, what="core_wait_s", late_s=0.5)
    (found,) = pace_of(run)
    assert found == "rank 2 waited for a core, 0.5 s per step, longer than the others (0.021 s)"
    waits(run, rank=2, what="core_wait_s", late_s=0.1)
    assert pace_of(run) == []


def test_foreign_lines(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", KILLED_AND_RESTARTED[:2], metrics(800, 2.0, 10))
    waits(run, rank=3, what="data_wait_s", late_s=1.9)
    with (run / "ranks/rank-3.jsonl").open("a") as file:
        file.write('{"step": "x", "data_wait_s": {}}\n[]\n{"step": 810, "data_w')
    (run / "ranks/rank-x.jsonl").write_text("{}\n")
    record = read_record(run)
    assert "rank 3 waited for data, 1.9 s" in record.pace[0]
    assert any("rank-3.jsonl: its last line is cut short" in one for one in record.missing)
