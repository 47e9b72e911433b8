"""Verdicts: the first number out of tolerance is named."""

import math
from pathlib import Path

import pytest

from toolkit.layout import Layout
from toolkit.rehearse.comparison import (
    EXACT,
    OFFLOAD_TOLERANCE,
    TOLERANCE,
    Record,
    compare,
    read_record,
    tolerance,
    write_step,
)

REFERENCE = Record((5.0, 4.0, 3.0), (1.0, 2.0, 3.0))


def moved(quantity: str, step: int, factor: float) -> Record:
    """The reference with one number changed."""
    numbers = list(getattr(REFERENCE, quantity))
    numbers[step] *= factor
    return Record(**{"loss": REFERENCE.loss, "grad_norm": REFERENCE.grad_norm} | {
        quantity: tuple(numbers)
    })  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.0, "exact"),
        (1 + 2 * EXACT, "within"),
        (1 + 0.9 * TOLERANCE.loss, "within"),
        (1 - 1.1 * TOLERANCE.loss, "diverged"),
        (math.nan, "diverged"),
    ],
)
@pytest.mark.parametrize("quantity", ["loss", "grad_norm"])
def test_verdict(quantity: str, factor: float, verdict: str) -> None:
    assert compare(moved(quantity, 1, factor), REFERENCE, TOLERANCE).verdict == verdict


def test_first_divergence_is_the_earliest_step() -> None:
    record = Record((5.0, 4.0, 9.0), (1.0, 2.5, 9.0))
    found = compare(record, REFERENCE, TOLERANCE)
    assert found.first is not None
    assert str(found.first) == "step 2: gradient norm 2.5, reference 2"
    assert found.max_rel_loss == 2.0
    assert found.max_rel_grad_norm == 2.0


def test_offload_has_its_own_tolerance() -> None:
    assert tolerance(Layout(zero_stage=3)) == TOLERANCE
    assert tolerance(Layout(zero_stage=2, offload_optimizer="cpu")) == OFFLOAD_TOLERANCE
    assert tolerance(Layout(zero_stage=3, offload_parameters="cpu")) == OFFLOAD_TOLERANCE


def test_record_keeps_every_digit(tmp_path: Path) -> None:
    steps = [(0.1 + 0.2, 1 / 3), (math.nan, math.inf)]
    for loss, grad_norm in steps:
        write_step(tmp_path, loss, grad_norm)
    record = read_record(tmp_path)
    assert record.loss[0] == 0.1 + 0.2
    assert record.grad_norm == (1 / 3, math.inf)
    assert math.isnan(record.loss[1])
