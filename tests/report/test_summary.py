"""What a run has done, and how it ended."""

import pytest

from tests.report.logs import KILLED_AND_RESTARTED, event, metrics
from toolkit.report.summary import Ending, summarize


def test_steps_are_those_of_the_last_start() -> None:
    """Steps 11 to 14 of the first start are lost when the second one stops at 12."""
    failed = event(49, "end", rank=0, step=14, exit_code=4)
    before, after = KILLED_AND_RESTARTED[:3], KILLED_AND_RESTARTED[3:6]
    log = [*before, failed, *after, event(64, "end", step=12, exit_code=75)]
    assert summarize(log, metrics(12, 2.0)).steps == 12


def test_a_failure_names_the_first_rank_that_failed() -> None:
    log = [
        event(0, "launch"),
        event(5, "start", step=0),
        event(9, "end", rank=1, step=3, exit_code=4, error="out of memory"),
        event(9.1, "end", rank=0, step=3, exit_code=4, error="connection reset"),
    ]
    assert summarize(log, []).ending == Ending("failed", 4, "rank 1: out of memory")


def test_the_cause_is_the_one_that_the_launcher_printed() -> None:
    log = [
        event(0, "launch"),
        event(5, "start", step=0),
        event(9, "end", rank=0, step=3, exit_code=4, error="lost contact with another rank"),
        event(9.5, "failure", exit_code=4, reason="rank 1 was killed by SIGKILL"),
    ]
    assert summarize(log, []).ending == Ending("failed", 4, "rank 1 was killed by SIGKILL")
    assert summarize([*log, event(20, "launch")], []).ending == Ending("running")


def test_a_signal_is_named() -> None:
    log = [
        event(5, "start", step=0),
        event(8, "signal", rank=1, step=3, signal="SIGTERM"),
        event(9, "end", rank=0, step=3, exit_code=75),
    ]
    assert summarize(log, []).ending == Ending("stopped", 75, "SIGTERM")


def test_a_new_start_is_open_whatever_the_one_before_did() -> None:
    log = [*KILLED_AND_RESTARTED, event(100, "launch")]
    assert summarize(log, metrics(20, 2.0)).ending.state == "running"


def test_an_infinite_loss_is_read() -> None:
    line = {"step": 1, "loss": "Infinity", "step_time_s": 1.0}
    found = summarize([event(5, "start", step=0)], [line])
    assert found.losses is not None and found.losses[0].value == float("inf")


def test_how_long_a_run_waited_for_data() -> None:
    """Weighted by the steps that a line stands for; older releases did not measure it."""
    lines = [
        {"step": 1, "step_time_s": 4.0, "data_wait_s": 4.0},
        {"step": 11, "step_time_s": 2.0, "data_wait_s": 0.2},
    ]
    assert summarize([], lines).data_wait_share == pytest.approx((4 + 10 * 0.2) / (4 + 10 * 2))
    assert summarize([], metrics(20, 2.0)).data_wait_share is None
