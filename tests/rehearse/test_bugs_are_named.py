"""The rehearsal bites: real engines with one real bug each are named, with step and quantity.

With each of these bugs, training goes on without an error.
"""

import pytest

from tests.rehearse import bugs
from tests.rehearse.conftest import Rehearse
from toolkit.rehearse.comparison import Divergence
from toolkit.rehearse.rehearsal import LayoutResult

pytestmark = pytest.mark.slow


def first_divergence(outcome: LayoutResult) -> Divergence:
    """Where the layout left the reference, as the user is told, too."""
    assert not outcome.log, outcome.log
    assert outcome.comparison is not None
    assert outcome.verdict == "diverged"
    first = outcome.comparison.first
    assert first is not None
    assert outcome.why == str(first)
    return first


def test_dropped_gradient_reduction(rehearse: Rehearse) -> None:
    """A wrong gradient shows as a wrong norm first: the loss of that step is still right."""
    layouts = "ddp", "zero2", "megatron-tp2-sp"
    found = rehearse(*layouts, bug="dropped_reduction")
    for layout in layouts:
        first = first_divergence(found[layout])
        assert (first.step, first.quantity) == (bugs.STEP, "grad_norm"), layout


def test_batched_p2p_between_two_stages(rehearse: Rehearse) -> None:
    """With four micro batches even the loss is wrong, by a thousandth; the gradient by 28%."""
    layout = "megatron-pp2-vpp2"
    outcome = rehearse(layout, bug="batched_p2p")[layout]
    first = first_divergence(outcome)
    assert (first.step, first.quantity) == (1, "loss"), first
    assert outcome.comparison is not None
    assert outcome.comparison.max_rel_grad_norm > 0.1


def test_forgotten_weight_decay(rehearse: Rehearse) -> None:
    """The steps are large enough to show a wrong update, not only a wrong gradient."""
    outcome = rehearse("ddp", bug="no_weight_decay", steps=5)["ddp"]
    assert first_divergence(outcome).step > 1
