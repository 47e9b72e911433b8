"""What a layout did step by step, and its comparison with the reference: one verdict, and the
first difference."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from toolkit.layout import Layout
from toolkit.run import jsonl

_STEPS = "steps.jsonl"


@dataclass(frozen=True)
class Record:
    """Loss and gradient norm of each step that was taken. Equally long."""

    loss: tuple[float, ...] = ()
    grad_norm: tuple[float, ...] = ()


def write_step(folder: Path, loss: float, grad_norm: float) -> None:
    """Add one step to the record in `folder`, all digits kept."""
    jsonl.append(folder / _STEPS, {"loss": loss, "grad_norm": grad_norm})


def read_record(folder: Path) -> Record:
    """The steps that were written to `folder`. Empty if the layout did not get that far."""
    lines = jsonl.read(folder / _STEPS)
    return Record(
        tuple(float(line["loss"]) for line in lines),
        tuple(float(line["grad_norm"]) for line in lines),
    )


class Bounds(NamedTuple):
    """The largest relative differences that count as equal."""

    loss: float
    grad_norm: float


Verdict = Literal["exact", "within", "diverged", "skipped"]

EXACT = 2.0**-23
"""Relative difference of neighbouring fp32 numbers: nothing smaller can be distinguished."""
TOLERANCE = Bounds(1e-5, 1e-5)
"""Other orders of summation, over tens of steps of fp32."""
OFFLOAD_TOLERANCE = Bounds(1e-4, 1e-4)
"""DeepSpeed's C++ Adam on the CPU rounds differently from torch's."""


@dataclass(frozen=True)
class Divergence:
    """The first number that differs by more than the tolerance."""

    step: int
    """Counted from 1."""
    quantity: str
    """`loss` or `grad_norm`."""
    found: float
    expected: float

    def __str__(self) -> str:
        label = "loss" if self.quantity == "loss" else "gradient norm"
        return f"step {self.step}: {label} {self.found:.7g}, reference {self.expected:.7g}"


@dataclass(frozen=True)
class Comparison:
    """Differences between a layout and the reference."""

    verdict: Verdict
    max_rel_loss: float
    """Largest relative difference of any step. Infinite where a number is not finite."""
    max_rel_grad_norm: float
    first: Divergence | None = None


def tolerance(layout: Layout) -> Bounds:
    """The tolerance for fp32 rounding in this layout."""
    offloaded = (layout.offload_optimizer, layout.offload_parameters) != ("none", "none")
    return OFFLOAD_TOLERANCE if offloaded else TOLERANCE


def compare(record: Record, reference: Record, bounds: Bounds) -> Comparison:
    """Compare step by step, loss before gradient norm. Both took the same steps."""
    worst = {"loss": 0.0, "grad_norm": 0.0}
    first: Divergence | None = None
    for step in range(len(reference.loss)):
        for quantity in worst:
            found = getattr(record, quantity)[step]
            expected = getattr(reference, quantity)[step]
            difference = relative_difference(found, expected)
            worst[quantity] = max(worst[quantity], difference)
            if difference > getattr(bounds, quantity) and first is None:
                first = Divergence(step + 1, quantity, found, expected)
    verdict: Verdict = "within"
    if first is not None:
        verdict = "diverged"
    elif max(worst.values()) <= EXACT:
        verdict = "exact"
    return Comparison(verdict, worst["loss"], worst["grad_norm"], first)


def relative_difference(found: float, expected: float) -> float:
    """|found - expected| / |expected|. Infinite if that is not finite."""
    if found == expected:
        return 0.0
    if not (math.isfinite(found) and math.isfinite(expected)) or expected == 0.0:
        return math.inf
    return abs(found - expected) / abs(expected)
