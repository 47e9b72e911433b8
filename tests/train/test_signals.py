"""Stop requests: flags from signals, agreed on by real gloo processes."""

import os
import signal
import time

import pytest

from tests.forked import run_ranks
from tests.train.stop_rank import last_step
from toolkit.system.handlers import STOP_SIGNALS
from toolkit.train.step_reduction import StopRequest


def raise_here(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_only_sets_the_flag(number):
    with StopRequest() as stop:
        assert not stop.stop_requested
        raise_here(number)
        assert stop.stop_requested
        assert stop.reason == number.name


def test_handlers_are_restored():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequest():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_the_third_interrupt_gets_through():
    with StopRequest() as stop:
        raise_here(signal.SIGINT)
        raise_here(signal.SIGTERM)
        raise_here(signal.SIGINT)
        assert stop.stop_requested
        with pytest.raises(KeyboardInterrupt):
            raise_here(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signalled", "in_step", "expected"),
    [pytest.param(0, 3, 4, marks=pytest.mark.quick), (1, 1, 2), (-1, 0, 8), (1, 8, 8)],
    ids=["rank 0", "rank 1, first step", "nobody", "too late"],
)
def test_all_ranks_stop_at_the_same_step(signalled, in_step, expected):
    assert run_ranks(last_step, 2, signalled, in_step) == [expected, expected]
