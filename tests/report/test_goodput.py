"""Where the time of a run went, by hand-written logs whose sums are done by hand."""

import json
from typing import Any

import pytest

from tests.report.logs import KILLED_AND_RESTARTED, event, metrics
from toolkit.report.goodput import PARTS, Goodput, goodput
from toolkit.report.summary import summarize
from toolkit.run.jsonl import parse


def parts(found: Goodput) -> dict[str, Any]:
    assert list(found.parts_s) == list(PARTS)
    assert sum(found.parts_s.values()) == pytest.approx(found.total_s)
    return {name: pytest.approx(part, abs=1e-6) for name, part in found.parts_s.items()}


def test_every_cause_of_a_killed_and_restarted_run() -> None:
    found = goodput(KILLED_AND_RESTARTED, metrics(20, 2.0))
    assert found.total_s == 85 and found.idle_s == 0
    assert parts(found) == {
        "productive": 38,  # 20 steps of 2 s, less the skipped one
        "start_up": 10 + (10 - 2),
        "loading": 2,
        "replayed": 8,
        "saving": 0.8,
        "skipped": 2,
        "evaluation": 1,
        "hung": 0,
        "not_accounted": 85 - 38 - 18 - 2 - 8 - 0.8 - 2 - 1,
    }
    assert found.share == pytest.approx(38 / 85)
    assert found.percentages()["productive"] == 44.7


def test_lines_for_several_steps_count_every_step() -> None:
    log = [event(0, "launch"), event(5, "start", step=0), event(50, "end", step=20)]
    assert parts(goodput(log, metrics(20, 2.0, every=10)))["productive"] == 40


def test_a_line_of_a_step_that_was_logged_before_counts_once() -> None:
    log = [event(0, "launch"), event(5, "start", step=0), event(50, "end", step=20)]
    lines = [*metrics(20, 2.0), metrics(8, 2.0)[-1]]
    assert parts(goodput(log, lines))["productive"] == 40


def test_a_stop_by_hand_is_no_loss_of_the_run() -> None:
    log = [
        event(0, "launch"),
        event(4, "start", step=0),
        event(30, "save", step=10, seconds=1.0, stall_s=1.0),
        event(31, "end", step=10, exit_code=75),
        event(1000, "launch"),
        event(1006, "load", step=10, seconds=1.5),
        event(1007, "start", step=10),
        event(1007, "resume", step=10, dropped_metrics_lines=0),
        event(1030, "end", step=20, exit_code=0),
    ]
    found = goodput(log, metrics(20, 2.0))
    assert (found.total_s, found.idle_s) == (31 + 30, 1000 - 31)
    assert parts(found)["start_up"] == 4 + 7 - 1.5
    assert parts(found)["replayed"] == 0


def test_a_run_that_was_killed_outright_lived_for_as_long_as_its_last_steps() -> None:
    """No end, no restart: the step times say how long it went on after its last event."""
    log = [
        event(0, "launch"),
        event(10, "start", step=0),
        event(31, "save", step=10, seconds=1.0, stall_s=1.0),
    ]
    found = goodput(log, metrics(14, 2.0))
    assert found.total_s == 31 + 4 * 2
    assert parts(found)["productive"] == 28
    assert parts(found)["not_accounted"] == 0


def test_a_launch_after_a_kill_counts_the_steps_that_were_lost() -> None:
    log = [
        event(0, "launch"),
        event(10, "start", step=0),
        event(31, "save", step=10, seconds=1.0, stall_s=1.0),
        event(500, "launch"),
        event(510, "load", step=10, seconds=1.0),
        event(510, "start", step=10),
        event(510, "resume", step=10, dropped_metrics_lines=4),
        event(518, "replay", from_step=10, to_step=14, seconds=8.0),
        event(530, "end", step=20, exit_code=0),
    ]
    found = goodput(log, metrics(20, 2.0))
    assert found.total_s == (31 + 8) + 30
    assert found.idle_s == 500 - 39
    assert parts(found)["replayed"] == 8


def test_an_older_restart_from_the_beginning_is_no_launch() -> None:
    """A worker's own `restart` has no attempt: it says that nothing was saved."""
    log = [
        event(10, "start", step=0),
        event(20, "end", step=3, exit_code=4),
        event(30, "start", step=0),
        event(30, "restart", step=0, dropped_metrics_lines=3),
        event(40, "end", step=5, exit_code=0),
    ]
    found = goodput(log, metrics(5, 2.0))
    assert found.total_s == 20
    assert summarize(log, []).starts == 2


def test_starts_that_never_trained_are_start_up() -> None:
    log = [
        event(0, "launch"),
        event(7, "end", rank=1, step=0, exit_code=4),
        event(8, "restart", attempt=1, reason="rank 1 failed"),
        event(20, "start", step=0),
        event(31, "end", step=5, exit_code=0),
    ]
    found = goodput(log, metrics(5, 2.0))
    assert found.total_s == 31
    assert parts(found)["start_up"] == 20


def test_a_clock_that_goes_back_does_not_make_parts_exceed_the_whole() -> None:
    log = [event(100, "launch"), event(105, "start", step=0), event(40, "end", step=10)]
    found = goodput(log, metrics(10, 2.0))
    assert parts(found)["productive"] == 20
    assert found.total_s == 20 + 5 and found.parts_s["not_accounted"] == 0


def test_a_hang_is_lost_from_the_halt_to_the_restart() -> None:
    log = [
        event(0, "launch"),
        event(10, "start", step=0, seconds=9.0),
        # Five steps of 2 s; the sixth halts at 20, which is found 30 s later.
        event(50, "hang", step=5, rank=0, idle_s=30.0),
        event(51, "end", rank=0, step=5, exit_code=4, error="hang: nothing done"),
        event(53, "restart", attempt=1, reason="rank 1 hung in step 6", from_step=0),
        event(60, "start", step=0, seconds=4.0),
        event(60, "replay", from_step=0, to_step=5, seconds=10.0),
        event(80, "end", rank=0, step=10, exit_code=0),
    ]
    found = parts(goodput(log, metrics(10, 2.0)))
    assert found["hung"] == 53 - 20
    assert found["start_up"] == 10 + (60 - 53)
    assert found["not_accounted"] == 0


def test_start_up_under_another_launcher() -> None:
    """No `launch`: `start` says how old its process was."""
    log = [
        event(12, "start", step=0, seconds=10.0),
        event(32, "save", step=10, seconds=1.0, stall_s=0.0),
        event(32, "end", step=10, exit_code=75),
        event(40, "restart", attempt=1, reason="the agent", from_step=10),
        event(45, "start", step=10, seconds=5.0),
        event(45, "load", step=10, seconds=2.0),
        event(65, "end", step=20, exit_code=0),
    ]
    found = goodput(log, metrics(20, 2.0))
    assert parts(found)["start_up"] == 10 + (5 - 2)
    assert (found.total_s, found.idle_s) == (38 + 25, 0)
    summary = summarize(log, [])
    assert (summary.starts, summary.restarts, summary.restarts_after_stop) == (2, (), 1)


def test_torn_and_foreign_lines_change_nothing() -> None:
    lines = [json.dumps(one).encode() for one in KILLED_AND_RESTARTED]
    torn = b"\n".join([*lines, b'{"time": "2026-01-01T12:0'])
    strange = b'\n{"kind": "save"}\n{"time": "soon", "kind": "save"}\n[1]\n7\n'
    read = list(parse(torn + strange))
    whole = goodput(KILLED_AND_RESTARTED, metrics(20, 2.0))
    assert goodput(read, metrics(20, 2.0)) == whole
