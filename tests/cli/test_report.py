"""`dmt report` as a user and as a program reads it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.dmt import Dmt
from tests.report.logs import KILLED_AND_RESTARTED, event, metrics
from toolkit.report.goodput import PARTS


def write(folder: Path, events: list[dict[str, Any]], lines: list[dict[str, Any]]) -> Path:
    for name, records in {"events": events, "metrics": lines}.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text + '{"torn')
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path, KILLED_AND_RESTARTED, metrics(20, 2.0))


def test_the_whole_page(run: Path, dmt: Dmt) -> None:
    page = dmt("report", run).out
    assert page == (
        f"""\
{run}
  ended        finished (exit code 0)
  steps        20 done, 2,000 trained tokens up to the last logged one
  loss         4.9900 at step 1 → 4.8000 at 20
  validation   4.5000 at step 20
  starts       2, 1 of them by the launcher
               - rank 1 was killed by SIGKILL
  checkpoints  2 written, the last at step 20; training stood still for 0.40 s each; \
2.50 s until committed

  goodput  44.7% of 85.0 s
    productive                  38.0 s   44.7%  ███████████
    start-up and restarts       18.0 s   21.2%  █████
    loading checkpoints         2.00 s    2.4%  █
    replayed steps              8.00 s    9.4%  ██
    saving (stalls)             0.80 s    0.9%
    skipped batches             2.00 s    2.4%  █
    evaluation                  1.00 s    1.2%
    hangs and detection         0.00 s    0.0%
    not accounted               15.2 s   17.9%  ████
"""
    )


def test_a_run_that_waits_for_its_data(tmp_path: Path, dmt: Dmt) -> None:
    for waited_s, told in ((0.5, True), (0.1, False)):
        lines = [line | {"data_wait_s": waited_s} for line in metrics(20, 2.0)]
        page = dmt("report", write(tmp_path, KILLED_AND_RESTARTED, lines)).out
        assert ("data         25% of the step time was spent waiting for" in page) is told


def test_for_programs(run: Path, dmt: Dmt) -> None:
    found = dmt("report", run, "--json").json
    assert list(found["time_s"]) == list(PARTS)
    assert sum(found["time_s"].values()) == pytest.approx(found["total_s"]) == 85
    assert found["goodput"] == pytest.approx(38 / 85)
    assert found["losses"]["last"] == {"step": 20, "value": 4.8}
    assert found["ending"] == {"state": "done", "exit_code": 0, "why": ""}
    assert found["prediction"] is None and found["restarts"] != []


def test_it_fits_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch, dmt: Dmt) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    out = re.sub(r"\x1b\[[0-9;]*m", "", dmt("report", run).out)
    path, *lines = out.split("\n  ended", 1)[1].splitlines()
    assert max(map(len, lines)) <= 80, path


def test_a_run_that_goes_on(tmp_path: Path, dmt: Dmt) -> None:
    write(tmp_path, KILLED_AND_RESTARTED[:3], metrics(12, 2.0))
    out = dmt("report", tmp_path).out
    assert "ended        not yet: it is running" in out
    assert "steps        12 done" in out
    assert "goodput  61.5% of 39.0 s\n" in out  # 24 of 35 + 2 × 2


def test_a_run_that_has_just_begun(tmp_path: Path, dmt: Dmt) -> None:
    write(tmp_path, [event(0, "launch")], [])
    assert "nothing to divide yet" in dmt("report", tmp_path).out


def test_mistakes(dmt: Dmt) -> None:
    said = dmt("report", "nowhere", code=2).err
    assert "nowhere is not a run directory with events" in said
    said = dmt("report", "nowhere", "--html", "x.html", "--json", code=2).err
    assert "--json and --html: one form at a time" in said
