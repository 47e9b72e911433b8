"""Where the time of a run went, by hand-written logs whose sums are done by hand."""

from typing import Any

import pytest

from tests.report.logs import KILLED_AND_RESTARTED, event, metrics
from toolkit.report.goodput import PARTS, Goodput, goodput
from toolkit.report.summary import summarize


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


PLAIN = [event(0, "launch"), event(5, "start", step=0), event(50, "end", step=20)]
STOPPED_BY_HAND = [
    event(0, "launch"),
    event(4, "start", step=0),
    event(30, "save", step=10, seconds=1.0, stall_s=1.0),
    event(31, "end", step=10, exit_code=75),
    event(1002, "change", step=10, key="optimizer.learning_rate", now=1e-4),  # by this launch
    event(1000, "launch"),
    event(1006, "load", step=10, seconds=1.5),
    event(1007, "start", step=10),
    event(1007, "resume", step=10, dropped_metrics_lines=0),
    event(1030, "end", step=20, exit_code=0),
]
KILLED = [
    event(0, "launch"),
    event(10, "start", step=0),
    event(31, "save", step=10, seconds=1.0, stall_s=1.0),
]
CONTINUED = [
    event(500, "launch"),
    event(510, "load", step=10, seconds=1.0),
    event(510, "start", step=10),
    event(510, "resume", step=10, dropped_metrics_lines=4),
    event(518, "replay", from_step=10, to_step=14, seconds=8.0),
    event(530, "end", step=20, exit_code=0),
]
FROM_THE_BEGINNING = [
    event(10, "start", step=0),
    event(20, "end", step=3, exit_code=4),
    event(30, "start", step=0),
    event(30, "resume", step=0, dropped_metrics_lines=3),
    event(40, "end", step=5, exit_code=0),
]
NEVER_TRAINED = [
    event(0, "launch"),
    event(7, "end", rank=1, step=0, exit_code=4),
    event(8, "restart", attempt=1, reason="rank 1 failed"),
    event(20, "start", step=0),
    event(31, "end", step=5, exit_code=0),
]
CLOCK_SET_BACK = [event(100, "launch"), event(105, "start", step=0), event(40, "end", step=10)]
HUNG = [
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
ANOTHER_LAUNCHER = [
    # No `launch`: `start` says how old its process was.
    event(12, "start", step=0, seconds=10.0),
    event(32, "save", step=10, seconds=1.0, stall_s=0.0),
    event(32, "end", step=10, exit_code=75),
    event(40, "restart", attempt=1, reason="the agent", from_step=10),
    event(45, "start", step=10, seconds=5.0),
    event(45, "load", step=10, seconds=2.0),
    event(65, "end", step=20, exit_code=0),
]
CASES: dict[str, tuple[Any, Any, tuple[float, float], dict[str, float]]] = {
    "lines for several steps": (PLAIN, metrics(20, 2.0, every=10), (50, 0), {"productive": 40}),
    "a line of a step that was logged before": (
        PLAIN, [*metrics(20, 2.0), metrics(8, 2.0)[-1]], (50, 0), {"productive": 40}),
    "a stop by hand is no loss": (STOPPED_BY_HAND, metrics(20, 2.0), (31 + 30, 1000 - 31),
                                  {"start_up": 4 + 7 - 1.5, "replayed": 0}),
    # No end, no restart: the step times say how long it lived after its last event.
    "killed outright": (KILLED, metrics(14, 2.0), (31 + 4 * 2, 0),
                        {"productive": 28, "not_accounted": 0}),
    "a launch after a kill": ([*KILLED, *CONTINUED], metrics(20, 2.0),
                              ((31 + 8) + 30, 500 - 39), {"replayed": 8}),
    "a worker begins again": (FROM_THE_BEGINNING, metrics(5, 2.0), (20, 10), {}),
    "starts that never trained": (NEVER_TRAINED, metrics(5, 2.0), (31, 0), {"start_up": 20}),
    "a clock that is set back": (CLOCK_SET_BACK, metrics(10, 2.0), (20 + 5, 0),
                                 {"productive": 20, "not_accounted": 0}),
    "a hang, from the halt to the restart": (
        HUNG, metrics(10, 2.0), (80, 0),
        {"hung": 53 - 20, "start_up": 10 + (60 - 53), "not_accounted": 0}),
    "another launcher": (ANOTHER_LAUNCHER, metrics(20, 2.0), (38 + 25, 0),
                         {"start_up": 10 + (5 - 2)}),
}  # fmt: skip
"""Events, metrics, seconds in all and between starts, and some of the parts."""


@pytest.mark.parametrize("name", CASES)
def test_the_parts(name: str) -> None:
    log, lines, (total_s, idle_s), expected = CASES[name]
    found = goodput(log, lines)
    assert (found.total_s, found.idle_s) == (total_s, idle_s)
    assert parts(found) | expected == parts(found)


def test_starts_and_restarts_are_told_apart() -> None:
    assert summarize(FROM_THE_BEGINNING, []).starts == 2
    summary = summarize(ANOTHER_LAUNCHER, [])
    assert (summary.starts, summary.restarts) == (2, ("the agent",))
