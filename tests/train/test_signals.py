"""Stop requests: flags from signals, agreed on by real gloo processes, and told to trackers."""

import os
import signal
import time
from contextlib import ExitStack
from unittest.mock import MagicMock

import pytest

from tests.forked import run_ranks
from toolkit.engines.distributed import join, leave
from toolkit.system.handlers import STOP_SIGNALS
from toolkit.train import worker
from toolkit.train.step_reduction import StepReduction, StopRequest


def last_step(signalled: int, in_step: int) -> int:
    """The step after which this rank stops, of 8; `signalled` gets SIGTERM in `in_step`."""
    rank = join().rank
    step = 0
    with StopRequest() as stop:
        reduction = StepReduction(stop)
        while step < 8:
            step += 1
            reduction.begin(rank + step)
            time.sleep(0.02 * rank)
            if rank == signalled and step == in_step:
                os.kill(os.getpid(), signal.SIGTERM)
            stopping, (total,) = reduction.finish()
            assert total == 1 + 2 * step, "the sum over both ranks"
            if stopping:
                break
    leave()
    return step


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


def test_trackers_are_told_the_exit_code(monkeypatch):
    told = []
    monkeypatch.setattr(worker, "leave", lambda: None)
    monkeypatch.setattr(worker.dist, "barrier", lambda _: None)
    for end in (
        lambda rank: worker._end(rank, 75),
        lambda rank: worker._fail(rank, ValueError(), 2, "a mistake"),
    ):
        rank = MagicMock(at_end=ExitStack(), leads=False)
        rank.at_end.callback(lambda rank=rank: told.append(rank.exit_code))
        end(rank)
    assert told == [75, 2]
