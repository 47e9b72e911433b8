"""The rehearsal bites: real engines with one real bug each are named, with step and quantity.

Regression for PAINS 1: each of these bugs trains on without an error.
"""

import pytest

from tests.rehearse import dropped_reduction
from tests.rehearse.conftest import Rehearse
from toolkit.rehearse.rehearsal import Outcome
from toolkit.rehearse.table import why

pytestmark = pytest.mark.slow


def assert_named(outcome: Outcome, step: int) -> None:
    """A wrong gradient shows as a wrong norm first: the loss of that step is still right."""
    assert outcome.failure is None, outcome.failure
    assert outcome.comparison is not None
    assert outcome.comparison.verdict == "diverged"
    first = outcome.comparison.first
    assert first is not None
    assert (first.step, first.quantity) == (step, "grad_norm"), first
    assert f"step {step}: gradient norm" in why(outcome)


@pytest.mark.parametrize("layout", ["ddp", "zero2", "megatron-dp2-distopt", "megatron-tp2-sp"])
def test_dropped_gradient_reduction(rehearse: Rehearse, layout: str) -> None:
    found = rehearse(layout, worker="tests.rehearse.dropped_reduction")
    assert_named(found[layout], dropped_reduction.STEP)


def test_batched_p2p_between_two_stages(rehearse: Rehearse) -> None:
    layout = "megatron-pp2-vpp2"
    found = rehearse(layout, worker="tests.rehearse.batched_p2p")
    assert_named(found[layout], step=1)
